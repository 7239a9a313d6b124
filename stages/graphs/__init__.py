"""The built-in kinds of runs, each made of stages joined by named edges."""
