"""Videos of stored episodes, which are simulated again and drawn."""
