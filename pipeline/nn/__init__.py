"""Networks, distributions and optimizers."""
