"""Measures of groups of runs: mean, interquartile mean, performance profile.

Each takes weights [..., R] of the runs, adding up to 1, in place of groups in which runs stand more than once: a
resample is a row of weights, and a thousand of them cost one sort.
"""

import numpy as np

from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array

_NUMBERS_AT_ONCE = 2**21


def mean_score(scores: Scores, weights: Array | None = None) -> Array:
    """The mean over runs of their mean scores, [...]."""
    return _weights(scores, weights) @ scores.run_means


def interquartile_mean(scores: Scores, weights: Array | None = None) -> Array:
    """The mean of the middle half of all scores of all runs, [...] (arXiv:2108.13264, section 4.3).

    A score that a quartile falls into counts in part, so that no number of scores makes a jump. Where the number of
    scores is no multiple of 4, scipy's `trim_mean`, which the paper's own library takes, leaves out whole scores only.
    """
    weights, (values, owner, share) = _weights(scores, weights), scores.ordered
    if weights.ndim > 1 and len(weights) > (block := max(1, _NUMBERS_AT_ONCE // len(values))):  # memory stays small
        return np.concatenate(
            [interquartile_mean(scores, weights[start : start + block]) for start in range(0, len(weights), block)]
        )
    each = weights[..., owner] * share
    above = np.cumsum(each, axis=-1)
    # Sums of floats end beside 1 by their last bits; then the quartiles would be of another whole.
    above /= above[..., -1:]
    below = np.concatenate([np.zeros_like(above[..., :1]), above[..., :-1]], axis=-1)
    middle = np.clip(np.minimum(above, 0.75) - np.maximum(below, 0.25), 0, None)
    return (middle @ values) / middle.sum(axis=-1)


def performance_profile(scores: Scores, thresholds: Array, weights: Array | None = None) -> Array:
    """Fraction of scores above every threshold [m], [..., m] (arXiv:2108.13264, section 4.2, run-score distribution).

    F(tau) is the mean over strata, runs and their tasks of 1[score > tau].
    """
    above = np.array([(run[:, None] > thresholds).mean(axis=0) for run in scores.runs])
    return _weights(scores, weights) @ above


def _weights(scores: Scores, weights: Array | None) -> Array:
    return scores.even_weights if weights is None else weights
