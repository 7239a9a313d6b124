"""The classes of ML10 as rules for many rows at once: their observations and rewards, on arrays.

They are tested against the package's own code, which takes one row at a time.
"""
