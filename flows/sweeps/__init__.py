"""Sweeps as data: what they consist of, how they are planned, stored, and told apart from one another."""
