"""Dataflows: stages, the edges between them, and the graphs they form."""
