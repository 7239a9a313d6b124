"""What flows between the stages of a run, and what learns from it."""
