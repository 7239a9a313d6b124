"""Execution of stages: in which order and where they run, and which are skipped because they are already stored."""
