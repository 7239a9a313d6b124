"""Sweeps as data: their plans, files and search spaces."""
