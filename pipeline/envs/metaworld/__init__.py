"""Meta-World: 50 manipulation tasks of a Sawyer arm, and the benchmarks that are made of them.

The package `metaworld` computes observations, rewards and successes; MuJoCo's batches simulate its rows.
"""
