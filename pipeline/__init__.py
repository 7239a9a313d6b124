"""Data that flows between the stages of a run, and the algorithms that learn from it."""
