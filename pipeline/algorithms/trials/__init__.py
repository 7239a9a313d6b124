"""Shared parts of algorithms that adapt within a trial: settings, trials on a device, and PPO on whole trials."""
