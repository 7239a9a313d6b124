"""Results of operations: frozen dataclasses with derived values, which views show."""
