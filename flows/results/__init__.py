"""Results of operations: frozen dataclasses and derived values. Operations make them, views show them."""
