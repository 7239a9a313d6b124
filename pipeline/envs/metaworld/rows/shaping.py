"""Building blocks of Meta-World's rewards, on arrays of any shape.

They are from the DeepMind control suite (Tassa et al. 2018, arXiv:1801.00690, "tolerance"), with Hamacher's t-norm. All
operations are elementwise, so a row's bits do not depend on other rows.
"""

import numpy as np

from metaloom.pipeline.types import Array

# Too small to change any other sum; avoids 0 / 0 and makes it 1 or 0 as each function requires.
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

    With a margin of 0 this is a step function.
    """
    outside = np.maximum(excess, 0)
    square = margin * margin + _TINY
    return square / (9 * (outside * outside) + square)


def gaussian(excess: Array, margin: Array) -> Array:
    """Return 1 up to an excess of 0, then 0.1 to the power of (excess / margin)²."""
    outside = np.maximum(excess, 0)
    return np.exp(_LOG_VALUE_AT_MARGIN * (outside * outside / (margin * margin + _TINY)))


def hamacher(first: Array, second: Array) -> Array:
    """Return Hamacher's product of two values in [0, 1]: ab / (a + b - ab), and 0 if both are 0."""
    product = first * second
    return product / (first + second - product + _TINY)


def fraction_of_box(places: Array, empty: Array, full: Array) -> Array:
    """Return the fraction of a box between the corner `empty` and a point, [n]; 1 for points outside.

    Args:
        places: Points [n, 3].
        empty: [n, 3], the corner where the fraction is 0.
        full: [n, 3], the opposite corner, where it is 1.
    """
    inside = (np.minimum(empty, full) <= places) & (places <= np.maximum(empty, full))
    shares = (places - empty) / (full - empty)
    return np.where(inside.all(axis=1), shares[:, 0] * shares[:, 1] * shares[:, 2], 1.0)
