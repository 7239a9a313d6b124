"""Averages over tasks that a few outliers do not decide, and how sure one can be of them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.types import Array

RESAMPLES = 2000
CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 2**22

Statistic = Callable[[Array], Array]
"""From [..., n] to [...]."""


class Interval(NamedTuple):
    """An estimate with the ends of its confidence interval; NaN where there is none."""

    estimate: float
    low: float
    high: float


def interquartile_mean(values: Array) -> Array:
    """The mean of the middle half of the values, along the last axis.

    Agarwal et al. 2021, arXiv:2108.13264. Where a quartile falls into a value, that value counts in part, so that no
    number of values makes a jump; of one or two values it is the mean.
    """
    n = values.shape[-1]
    # Value i of the sorted n takes up [i, i+1); the middle half is [n/4, 3n/4).
    place = np.arange(n, dtype=np.int64)
    weights = np.clip(np.minimum(place + 1, 0.75 * n) - np.maximum(place, 0.25 * n), 0, None)
    return np.sort(values, axis=-1) @ (weights / weights.sum())


def mean(values: Array) -> Array:
    """The mean along the last axis."""
    return values.mean(axis=-1)


def bootstrap(
    returns: Array, statistic: Statistic, rng: np.random.Generator, *, resamples: int = RESAMPLES
) -> Interval:
    """A statistic of the tasks' mean returns, with its percentile bootstrap interval.

    What is resampled is what was drawn: the tasks, and for each of them its episodes. A single episode says nothing
    about how others would differ from it: the ends are NaN.

    Args:
        returns: [B, M], of M episodes of each of B tasks.
        statistic: of the tasks' means.
        rng: where resamples are drawn from.
        resamples: how many.
    """
    B, M = returns.shape
    estimate = float(statistic(returns.mean(axis=1)))
    if B * M == 1:
        return Interval(estimate, math.nan, math.nan)
    block = max(1, _DRAWS_AT_ONCE // (B * M))
    estimates: list[Array] = []
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        tasks = rng.integers(B, size=(count, B, 1))
        episodes = rng.integers(M, size=(count, B, M))
        estimates.append(statistic(returns[tasks, episodes].mean(axis=2)))
    low, high = np.quantile(np.concatenate(estimates), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(estimate, float(low), float(high))
