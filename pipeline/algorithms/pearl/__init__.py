"""PEARL: a soft actor-critic conditioned on a latent variable inferred for each task."""
