"""Where rollouts run: in this process, in supervised workers, on Dask."""
