"""Environments: robots with a distribution of tasks, and any gymnasium env as one with a single task."""
