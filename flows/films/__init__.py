"""Films of stored episodes: simulate them again, draw what happens, and write it to a file."""
