"""Trained policies outside of runs: acting, adapting to a custom environment, files, other formats."""
