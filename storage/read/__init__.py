"""Reading committed data: history, tables, datasets, verification."""
