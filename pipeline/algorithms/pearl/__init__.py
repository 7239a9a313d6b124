"""PEARL: settings, rounds of collection, networks, posterior over tasks, gradient steps."""
