"""Stored runs in other formats."""
