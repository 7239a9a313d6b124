"""Implementations of longer operations, imported on use by `operations.late`."""
