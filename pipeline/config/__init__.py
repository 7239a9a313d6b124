"""Configuration: a run's settings, read from files and `--set`."""
