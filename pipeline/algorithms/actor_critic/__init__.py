"""What A2C, PPO, PPO2 and SVPG share: settings, critic, experience, and the loop over minibatches. NumPy only."""
