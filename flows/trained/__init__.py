"""Trained policies outside of runs: acting, adapting to a custom environment, and saving in several formats."""
