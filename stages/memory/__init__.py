"""What stages keep in memory between iterations. It changes no result."""
