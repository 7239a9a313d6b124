"""Reading of committed data: history, tables, datasets, verification."""
