"""Estimation of returns and advantages, and statistics and diagnostics of episodes."""
