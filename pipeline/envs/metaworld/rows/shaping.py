"""The shapes that Meta-World's rewards are made of, on arrays of any shape.

They are from the DeepMind control suite (Tassa et al. 2018, arXiv:1801.00690, "tolerance"), with the t-norm of
Hamacher. Every operation works on each element by itself, so a row's bits do not depend on its neighbours.
"""

import numpy as np

from metaloom.pipeline.types import Array

# Too small to move a sum of anything else; keeps 0 / 0 from being asked, and makes it 1 or 0 as each shape wants it.
_TINY = float(np.finfo(np.float64).tiny)

_LOG_VALUE_AT_MARGIN = float(np.log(0.1))


def norm(vectors: Array) -> Array:
    """Return the lengths [...] of vectors [..., 3]."""
    return np.sqrt(np.vecdot(vectors, vectors))


def beyond(values: Array, low: float, high: float) -> Array:
    """Return how far values lie outside [low, high]; negative inside."""
    return np.maximum(low - values, values - high)


def long_tail(excess: Array, margin: Array | float) -> Array:
    """Return 1 up to an excess of 0, then 1 / (1 + (3 excess / margin)²): 0.1 at the margin.

    A margin of 0 makes it a step.
    """
    outside = np.maximum(excess, 0)
    square = margin * margin + _TINY
    return square / (9 * (outside * outside) + square)


def gaussian(excess: Array, margin: Array) -> Array:
    """Return 1 up to an excess of 0, then 0.1 to the power of (excess / margin)²."""
    outside = np.maximum(excess, 0)
    return np.exp(_LOG_VALUE_AT_MARGIN * (outside * outside / (margin * margin + _TINY)))


def hamacher(first: Array, second: Array) -> Array:
    """Return a conjunction of two values in [0, 1]: ab / (a + b - ab), and 0 where both are 0."""
    product = first * second
    return product / (first + second - product + _TINY)


def fraction_of_box(places: Array, empty: Array, full: Array) -> Array:
    """Return the share of a box between the corner `empty` and a point inside it, [n]; 1 for a point outside.

    Args:
        places: Points [n, 3].
        empty: [n, 3], the corner at which the share is 0.
        full: [n, 3], the corner opposite to it, at which it is 1.
    """
    inside = (np.minimum(empty, full) <= places) & (places <= np.maximum(empty, full))
    shares = (places - empty) / (full - empty)
    return np.where(inside.all(axis=1), shares[:, 0] * shares[:, 1] * shares[:, 2], 1.0)
