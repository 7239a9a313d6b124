"""The stages of each kind of run, and what computes them."""
