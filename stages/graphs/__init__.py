"""The kinds of runs there are: each a sentence of stages, joined by named edges."""
