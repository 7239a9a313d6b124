"""PEARL: settings, collection, networks, posterior over tasks, gradient steps."""
