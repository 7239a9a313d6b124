"""Reading what is committed: history, tables, datasets, verification."""
