"""Draw integers from uniform numbers: many draws at once, each from its own numbers only."""

import numpy as np

from metaloom.pipeline.types import Array

_BLOCK = 4096
"""Number of sets drawn side by side, so that they stay in the processor's cache."""


def draw_with_replacement(uniforms: Array, sizes: Array | int) -> Array:
    """Draw [...] int64 below `sizes` (broadcast) from `uniforms` [...] float64 in [0, 1)."""
    return (uniforms * sizes).astype(np.int64)


def draw_distinct(uniforms: Array, sizes: Array) -> Array:
    """Draw S sets of C different integers, set s from 0 to `sizes[s]` - 1. Every set of C has the same probability.

    Floyd's algorithm: Bentley and Floyd 1987, "A sample of brilliance", Communications of the ACM 30(9). Its cost does
    not depend on the sizes. The order within a set is not uniform.

    Args:
        uniforms: [S, C] float64 in [0, 1).
        sizes: [S], each at least C and below 2**31.

    Returns:
        [S, C] int64.
    """
    blocks = range(0, len(uniforms), _BLOCK)
    drawn = [_floyd(uniforms[first : first + _BLOCK], sizes[first : first + _BLOCK]) for first in blocks]
    return np.concatenate(drawn) if drawn else np.empty(uniforms.shape, np.int64)


def _floyd(uniforms: Array, sizes: Array) -> Array:
    size = uniforms.shape[1]
    chosen = np.empty((size, len(uniforms)), np.int32)
    for n in range(size):
        top = sizes - size + n
        candidate = (uniforms[:, n] * (top + 1)).astype(np.int32)
        taken = (chosen[:n] == candidate).any(axis=0)
        chosen[n] = np.where(taken, top, candidate)
    return chosen.T.astype(np.int64)
