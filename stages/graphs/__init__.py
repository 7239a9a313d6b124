"""Graphs of the built-in kinds of runs: stages joined by named edges."""
