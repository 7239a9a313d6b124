"""Return and advantage estimation, statistics, and diagnostics of episodes."""
