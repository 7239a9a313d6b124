"""Collecting rollouts in this process, in supervised local workers, or on a Dask cluster."""
