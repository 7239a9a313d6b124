"""Keeping part of a run: forks, thinning, unpacking, quarantine; repair and removal of runs."""
