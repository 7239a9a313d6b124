"""VariBAD: a policy conditioned on a posterior over the task, which a variational model of trials infers."""
