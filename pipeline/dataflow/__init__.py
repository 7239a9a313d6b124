"""The language of dataflows: stages, the edges between them, and the graphs that they form."""
