"""Running of stages: their order, where they run, and what is skipped because it is already stored."""
