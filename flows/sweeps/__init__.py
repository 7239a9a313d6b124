"""Sweeps as data: planning, storage and search spaces."""
