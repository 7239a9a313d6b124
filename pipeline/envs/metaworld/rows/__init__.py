"""The classes of ML10 as rules for many rows at once: what they observe and earn, on arrays.

The package's own code, one row at a time, is what they are held to.
"""
