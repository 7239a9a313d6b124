"""Statistics for evaluations: robust averages, returns by class, and Meta-World's success rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.types import Array

RESAMPLES = 2000
CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 2**22

Statistic = Callable[[Array], Array]  # function that reduces values [..., n] to [...]


class Interval(NamedTuple):
    """An estimate with its confidence interval, whose ends are NaN if it is undefined."""

    estimate: float
    low: float
    high: float


def interquartile_mean(values: Array) -> Array:
    """Return the interquartile mean along the last axis: the mean of the middle half of the values.

    Agarwal et al. 2021, arXiv:2108.13264. Values at the quartiles count in part. For one or two values, the result
    is their mean.
    """
    n = values.shape[-1]
    # The i-th of the n sorted values occupies [i, i+1); the middle half is [n/4, 3n/4).
    place = np.arange(n, dtype=np.int64)
    weights = np.clip(np.minimum(place + 1, 0.75 * n) - np.maximum(place, 0.25 * n), 0, None)
    return np.sort(values, axis=-1) @ (weights / weights.sum())


def mean(values: Array) -> Array:
    """Return the mean along the last axis."""
    return values.mean(axis=-1)


def bootstrap(
    returns: Array, statistic: Statistic, rng: np.random.Generator, *, resamples: int = RESAMPLES
) -> Interval:
    """Return a statistic of the tasks' mean returns, with a percentile bootstrap interval, given returns [B, M].

    Tasks are resampled and, within each task, episodes. With a single episode in total, the ends are NaN.
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


BALANCED = "balanced"  # name of the class-balanced mean; no class may have this name


class ClassEstimate(NamedTuple):
    """A mean with its standard error; each is NaN if undefined."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class ClassReturns:
    """Mean returns of a set of tasks by class."""

    names: tuple[str, ...]
    num_tasks: tuple[int, ...]
    estimates: tuple[ClassEstimate, ...]
    """Mean return over each class's tasks, with its standard error s / √n, where s has n - 1 degrees of freedom. The
    mean is NaN without tasks, the standard error with fewer than two."""

    @property
    def balanced(self) -> ClassEstimate:
        """Class-balanced mean (1/C) Σ m_c with its standard error (1/C) √(Σ se_c²)."""
        means, errors = zip(*self.estimates, strict=True)
        count = len(self.names)
        return ClassEstimate(sum(means) / count, math.sqrt(sum(error**2 for error in errors)) / count)


def class_returns(task_returns: Array, classes: Array, names: Sequence[str]) -> ClassReturns:
    """Return mean returns by class, given each task's mean return and class index, [B] each."""
    groups = [np.asarray(task_returns[classes == c], np.float64) for c in range(len(names))]
    estimates = tuple(
        ClassEstimate(
            float(values.mean()) if len(values) else math.nan,
            float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
        )
        for values in groups
    )
    return ClassReturns(tuple(names), tuple(map(len, groups)), estimates)


COUNTED_EPISODES = 3  # number of episodes per class that count in a group of environments

ENVIRONMENTS = 20
"""Number of parallel environments that are divided among the classes: the Meta-World package's default."""

UNTIL_SUCCESS = "steps_until_success"  # episode fact: the number of steps until success, if success ended the episode


def first_to_finish(lengths: Array, success: Array) -> float:
    """Return the success rate of the first COUNTED_EPISODES episodes of a class to finish.

    `metaworld.evaluation.evaluation` (version 3.1.1) runs a few environments of a class in parallel, ends episodes at
    success, and stops after three finished episodes of the class. Episodes without success last until the step limit,
    so successful episodes finish first and are overrepresented. Use this rate only to compare with published tables;
    the success rate over all test episodes measures the policy.

    The M episodes of each of n environments, with `lengths` in steps and `success` [n, M], end at success and run back
    to back. Ties are broken by the order of environments. Raises ValueError if M is less than COUNTED_EPISODES, since
    the rate could then depend on missing episodes.
    """
    if lengths.shape[1] < COUNTED_EPISODES:
        raise ValueError(f"got {lengths.shape[1]} episodes per environment; expected {COUNTED_EPISODES} or more")
    over = np.cumsum(lengths, axis=1)
    # Sorted by time, then by environment: an environment never finishes two episodes at once.
    order = np.lexsort((np.repeat(np.arange(len(over)), over.shape[1]), over.ravel()))
    return float(success.ravel()[order[:COUNTED_EPISODES]].mean())


def official_rates(lengths: Array, success: Array, of: Array, among: Sequence[int]) -> list[float]:
    """Return the official success rate of each class in `among`: `first_to_finish`, averaged over groups of tasks.

    `lengths` and `success` [B, M] describe test episodes that end at success; `of` [B] is the class index of each task.
    As in the Meta-World package, the tasks of a class form groups of ENVIRONMENTS // classes tasks, in order. Leftover
    tasks that do not fill a group are dropped, since the rate depends on the group size. Without a full group, the rate
    is NaN.
    """
    size = max(1, ENVIRONMENTS // len(among))
    rates: list[float] = []
    for c in among:
        rows = np.flatnonzero(of == c)
        rounds = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        found = [first_to_finish(lengths[tasks], success[tasks]) for tasks in rounds]
        rates.append(float(np.mean(found)) if found else np.nan)
    return rates
