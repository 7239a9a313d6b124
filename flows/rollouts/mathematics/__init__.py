"""The mathematics of stages on Dask workers, by chunks of tasks, where the episodes are."""
