"""Task distributions: sets of tasks, draws from them, and tasks for evaluation."""
