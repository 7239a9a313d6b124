"""Meta-World: 50 classes of manipulation tasks for a Sawyer arm, and their benchmarks.

The package `metaworld` defines observations, rewards and success; MuJoCo's batches simulate the rows.
"""
