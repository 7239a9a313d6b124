"""Data that flow between a run's stages, and the algorithms that learn from them."""
