"""Meta-World: 50 manipulation tasks of a Sawyer arm, and its benchmarks.

The package `metaworld` computes observations, rewards and successes; MuJoCo's batches simulate the rows.
"""
