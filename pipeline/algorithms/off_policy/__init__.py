"""What DQL, SAC and PEARL share: settings, Q-functions, the squashed Gaussian, and the loop over gradient steps."""
