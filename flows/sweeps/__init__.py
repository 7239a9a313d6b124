"""Sweeps as data: their contents, planning, storage and identity."""
