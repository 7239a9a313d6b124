"""Statistics of evaluations: robust averages, returns by class, and Meta-World's success rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.types import Array

RESAMPLES = 2000
CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 2**22

Statistic = Callable[[Array], Array]
"""Function from [..., n] to [...]."""


class Interval(NamedTuple):
    """An estimate with its confidence interval, whose ends are NaN if undefined."""

    estimate: float
    low: float
    high: float


def interquartile_mean(values: Array) -> Array:
    """Return the mean of the middle half of the values, along the last axis.

    Agarwal et al. 2021, arXiv:2108.13264. Values at the quartiles count in part. For one or two values this is the
    mean.
    """
    n = values.shape[-1]
    # Value i of the sorted n takes up [i, i+1); the middle half is [n/4, 3n/4).
    place = np.arange(n, dtype=np.int64)
    weights = np.clip(np.minimum(place + 1, 0.75 * n) - np.maximum(place, 0.25 * n), 0, None)
    return np.sort(values, axis=-1) @ (weights / weights.sum())


def mean(values: Array) -> Array:
    """Return the mean along the last axis."""
    return values.mean(axis=-1)


def bootstrap(
    returns: Array, statistic: Statistic, rng: np.random.Generator, *, resamples: int = RESAMPLES
) -> Interval:
    """Return a statistic of the tasks' mean returns, with its percentile bootstrap interval.

    Resamples tasks and, within each, episodes. With a single episode per task, the ends are NaN.

    Args:
        returns: [B, M], returns of M episodes for each of B tasks.
        statistic: Statistic of the tasks' means.
        rng: Generator of the resamples.
        resamples: Number of resamples.
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


BALANCED = "balanced"
"""Name of the mean over classes; no class has this name."""


class ClassEstimate(NamedTuple):
    """A mean with its standard error; NaN if undefined."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class ClassReturns:
    """Returns of some tasks by class.

    Attributes:
        names: Names of the C classes.
        num_tasks: Number of tasks of each class.
        estimates: Mean over each class's tasks of their mean returns, and its standard error over tasks:
            s / √n with n - 1 in s. Without a task there is no mean, with one task no standard error.
    """

    names: tuple[str, ...]
    num_tasks: tuple[int, ...]
    estimates: tuple[ClassEstimate, ...]

    @property
    def balanced(self) -> ClassEstimate:
        """Class-balanced mean (1/C) Σ m_c with its standard error (1/C) √(Σ se_c²)."""
        means, errors = zip(*self.estimates, strict=True)
        count = len(self.names)
        return ClassEstimate(sum(means) / count, math.sqrt(sum(error**2 for error in errors)) / count)


def class_returns(task_returns: Array, classes: Array, names: Sequence[str]) -> ClassReturns:
    """Return mean returns by class.

    Args:
        task_returns: [B] mean return of every task.
        classes: [B] the class of every task.
        names: Names of the C classes.
    """
    groups = [np.asarray(task_returns[classes == c], np.float64) for c in range(len(names))]
    estimates = tuple(
        ClassEstimate(
            float(values.mean()) if len(values) else math.nan,
            float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
        )
        for values in groups
    )
    return ClassReturns(tuple(names), tuple(map(len, groups)), estimates)


COUNTED_EPISODES = 3
"""Number of episodes of a class that count in one group of environments."""

ENVIRONMENTS = 20
"""Number of parallel environments, the package's default, divided among the classes."""

UNTIL_SUCCESS = "steps_until_success"
"""Fact of an episode: its length if success ended it."""


def first_to_finish(lengths: Array, success: Array) -> float:
    """Return the share of successes among the first COUNTED_EPISODES episodes of a class to finish.

    `metaworld.evaluation.evaluation` (version 3.1.1) runs a few environments of a class in parallel, ends episodes at
    success, and stops after three finished episodes of the class. Episodes without success last until the step limit,
    so successful ones finish first and are overrepresented. Use this to compare with published tables; the share over
    all test episodes measures the policy.

    Episodes of an environment follow each other immediately. Ties are broken by the order of environments.

    Args:
        lengths: [n, M], lengths in steps of n environments' episodes, ended by success.
        success: [n, M] bool.

    Raises:
        ValueError: M is less than COUNTED_EPISODES, so the rate may depend on missing episodes.
    """
    if lengths.shape[1] < COUNTED_EPISODES:
        raise ValueError(f"found {lengths.shape[1]} episodes of an environment; required {COUNTED_EPISODES} or more")
    over = np.cumsum(lengths, axis=1)
    # Sorted by time, then by environment: an environment never finishes two episodes at once.
    order = np.lexsort((np.repeat(np.arange(len(over)), over.shape[1]), over.ravel()))
    return float(success.ravel()[order[:COUNTED_EPISODES]].mean())


def official_rates(lengths: Array, success: Array, of: Array, among: Sequence[int]) -> list[float]:
    """Return the official success rate of each class: the mean over groups of `first_to_finish`.

    The tasks of a class form groups of ENVIRONMENTS // classes tasks in order, as in the package. Tasks that do not
    fill a group are dropped, since the rate depends on the size of groups.

    Args:
        lengths: [B, M], lengths in steps of test episodes, ended by success.
        success: [B, M] bool.
        of: [B], the class of every task.
        among: Indices of the classes.

    Returns:
        One rate per class in `among`; NaN for classes without a full group.
    """
    size = max(1, ENVIRONMENTS // len(among))
    rates: list[float] = []
    for c in among:
        rows = np.flatnonzero(of == c)
        rounds = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        found = [first_to_finish(lengths[tasks], success[tasks]) for tasks in rounds]
        rates.append(float(np.mean(found)) if found else np.nan)
    return rates
