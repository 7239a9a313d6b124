"""Objects that stages keep in memory between iterations. They change no result."""
