"""In what order the stages run, where, and what is skipped because it is already stored."""
