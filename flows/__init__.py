"""Execution of stages: their order, where they run, and which are skipped because they are already stored."""
