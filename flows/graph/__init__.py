"""Stage graphs for all kinds of runs, and the computation of their stages."""
