"""The stages of each kind of run, and their computation."""
