"""Orchestration: when and where stages run, and which are skipped because their outputs are already stored."""
