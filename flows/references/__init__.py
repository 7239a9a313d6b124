"""Reference runs: stored runs that ship with the project, so that anybody can compute any iteration of them again."""
