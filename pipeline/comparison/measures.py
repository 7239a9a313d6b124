"""Measures of groups of runs: interquartile mean, performance profile, probability of improvement.

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


def probability_of_improvement(
    x: Scores, y: Scores, x_weights: Array | None = None, y_weights: Array | None = None
) -> Array:
    """Probability that a run of x scores higher than one of y in the same stratum, [...]; ties count half.

    arXiv:2108.13264, section 4.3: the Mann-Whitney statistic P(X_m > Y_m), averaged over m. Where both were tested on
    the same tasks, m is a task; else runs are compared by their mean scores.

    Raises:
        ValueError: the groups have different strata.
    """
    if x.stratum_names != y.stratum_names:
        raise ValueError(f"found strata {x.stratum_names} and {y.stratum_names}; required the same")
    a, b = _weights(x, x_weights), _weights(y, y_weights)
    total = 0.0
    for name in x.stratum_names:
        wins = _wins(x, y, name)
        here_a, here_b = a[..., x.places(name)], b[..., y.places(name)]
        # The weights of a stratum add up to 1 / (number of strata), in both: one of the two factors is too many.
        total = total + np.einsum("...i,ij,...j->...", here_a, wins, here_b) * len(x.stratum_names)
    return np.asarray(total)


def compared_by_task(x: Scores, y: Scores) -> bool:
    """True where two groups were tested on the same tasks."""
    return x.same_tasks and y.same_tasks and (x + y).same_tasks


def _wins(x: Scores, y: Scores, stratum: str) -> Array:
    """[R_x, R_y], how often a run of x is higher than one of y, over tasks."""
    if compared_by_task(x, y):
        a, b = np.array(x.of_stratum(stratum)), np.array(y.of_stratum(stratum))
    else:
        a, b = x.run_means[x.places(stratum)][:, None], y.run_means[y.places(stratum)][:, None]
    difference = a[:, None] - b[None]
    return (0.5 * (np.sign(difference) + 1)).mean(axis=-1)


def _weights(scores: Scores, weights: Array | None) -> Array:
    return scores.even_weights if weights is None else weights
