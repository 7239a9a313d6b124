"""A page over stored runs, served on this machine: data as JSON from the readers of runs, drawn by the browser."""
