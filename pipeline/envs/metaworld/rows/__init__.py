"""Vectorized observations and rewards of the classes of ML10.

Tests compare them with the package's code, which computes one row at a time.
"""
