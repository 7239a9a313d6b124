"""Caches that stages keep in memory between iterations. Results do not depend on them."""
