"""VariBAD: a policy on a posterior over the task, which a variational model of trials learns to infer."""
