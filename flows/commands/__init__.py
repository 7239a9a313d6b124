"""One module per command: train, evaluate, replay, fork, optimize and the others."""
