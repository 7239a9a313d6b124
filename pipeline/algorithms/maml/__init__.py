"""Meta-gradient algorithms: ProMP and the MAML family."""
