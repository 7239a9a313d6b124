"""Common parts of DQL, SAC and PEARL: settings, Q-functions, the squashed Gaussian, the loop over gradient steps."""
