"""What algorithms that adapt within a trial share: their settings, trials on a device, and PPO on whole trials."""
