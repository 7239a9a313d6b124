"""Keeping part of a run: forks, thinning, quarantine."""
