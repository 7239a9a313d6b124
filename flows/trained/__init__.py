"""Policies that runs have learned, outside of them: acting, adapting to one's own robot, files, other formats."""
