"""Shared parts of algorithms that adapt within a trial: settings, losses on whole trials, and the base learner."""
