"""Configuration: a run's settings, and their input from files and `--set`."""
