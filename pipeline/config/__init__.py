"""Configuration: the sections of a run's settings, and reading them from files and `--set`."""
