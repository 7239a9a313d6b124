"""Common parts of A2C, PPO, PPO2 and SVPG: settings, critic, experience, and the loop over minibatches."""
