"""VariBAD: a policy conditioned on a posterior over the task, inferred by a variational autoencoder of trials."""
