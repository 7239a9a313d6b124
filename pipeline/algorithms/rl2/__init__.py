"""RL2: adaptation by the memory of a recurrent policy."""
