"""Execution of rollouts: in this process, in supervised workers, on Dask."""
