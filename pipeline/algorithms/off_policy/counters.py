"""Names of what off-policy learners count."""

NUM_UPDATES = "num_updates"
"""Iterations that the learner has learned from."""
NUM_GRADIENT_STEPS = "num_gradient_steps"
"""Gradient steps over the run."""
