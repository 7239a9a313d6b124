"""RL2: adaptation through a recurrent policy's memory."""
