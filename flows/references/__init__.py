"""Reference runs: stored runs that ship with the project, any iteration of which can be recomputed."""
