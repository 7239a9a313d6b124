"""Reference runs: stored runs that ship with the project and whose iterations anyone can recompute."""
