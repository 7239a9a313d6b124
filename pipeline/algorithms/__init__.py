"""Algorithms: hyper-parameters and the equations of a paper, one file each.

Importing this package does not import torch; the numerics are loaded when an algorithm first computes.
"""

from pipeline.algorithms.contract import Algorithm
from pipeline.algorithms.promp import ProMP

# A union discriminated by `name` as soon as there is a second member: pydantic refuses a discriminator for one.
AlgorithmConfig = ProMP

__all__ = ["Algorithm", "AlgorithmConfig", "ProMP"]
