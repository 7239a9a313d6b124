"""Tasks: sets and distributions of tasks, sampling from them, and tasks for evaluation."""
