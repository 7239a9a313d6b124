"""Returns, advantages, statistics and diagnostics of episodes."""
