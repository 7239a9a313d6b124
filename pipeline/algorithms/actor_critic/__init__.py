"""The actor-critic algorithms A2C, PPO, PPO2 and SVPG."""
