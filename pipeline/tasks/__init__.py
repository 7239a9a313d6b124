"""Task sets and distributions, sampling from them, and evaluation tasks."""
