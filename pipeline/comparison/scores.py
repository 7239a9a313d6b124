"""Scores of a group of runs, and summary measures in which a run's weight does not depend on its number of tasks.

Measures take run weights [..., R] that add up to 1. A resample is a row of weights, so a thousand resamples need only
one sort.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Scores:
    """Scores of R runs."""

    runs: tuple[Array, ...]  # scores [B_r] of each run, one per task; there is at least one run
    strata: tuple[str, ...]  # each run's environment; environments weigh the same, and resamples keep their run counts
    same_tasks: bool = False  # True if task b is the same task for all runs of a stratum

    def __post_init__(self) -> None:
        if not self.runs or len(self.runs) != len(self.strata):
            raise ValueError(
                f"got scores for {len(self.runs)} runs and strata for {len(self.strata)}; every "
                "run needs a stratum, and there must be at least one run"
            )
        for place, run in enumerate(self.runs):
            if run.ndim != 1 or not len(run) or not np.isfinite(run).all():
                raise ValueError(f"scores of run {place} are {run!r}; they must be one or more finite numbers [B]")
        if self.same_tasks and any(len({*map(len, self.of_stratum(name))}) > 1 for name in self.stratum_names):
            raise ValueError("the runs have different numbers of scores; for the same tasks, the numbers must be equal")

    @classmethod
    def of(cls, values: Sequence[Sequence[float]] | Array, *, same_tasks: bool = False) -> "Scores":
        """Build scores from one row per run, all in the same environment; rows may differ in length."""
        rows = tuple(np.asarray(row, np.float64) for row in cast(Sequence[Array], values))
        return cls(rows, ("",) * len(rows), same_tasks)

    def __len__(self) -> int:
        return len(self.runs)

    def __add__(self, other: "Scores") -> "Scores":
        """Join the runs of both groups, this group's first."""
        return Scores(self.runs + other.runs, self.strata + other.strata, self.same_tasks and other.same_tasks)

    @property
    def stratum_names(self) -> list[str]:
        return sorted(set(self.strata))

    def places(self, stratum: str) -> Array:
        """Return the indices of the runs in a stratum."""
        return np.flatnonzero(np.array(self.strata) == stratum)

    def of_stratum(self, stratum: str) -> list[Array]:
        return [run for run, name in zip(self.runs, self.strata, strict=True) if name == stratum]

    @cached_property
    def even_weights(self) -> Array:
        """Run weights [R] that add up to 1: equal across strata, and across the runs of a stratum."""
        names = self.stratum_names
        return np.array([1 / (len(names) * self.strata.count(name)) for name in self.strata])

    @cached_property
    def run_means(self) -> Array:
        """Mean score of each run, [R]."""
        return np.array([run.mean() for run in self.runs])

    @cached_property
    def ordered(self) -> tuple[Array, Array, Array]:
        """All scores in ascending order, with the run of each score and its weight within that run, [n] each."""
        values = np.concatenate(self.runs)
        owner = np.repeat(np.arange(len(self)), [len(run) for run in self.runs])
        share = np.concatenate([np.full(len(run), 1 / len(run)) for run in self.runs])
        order = np.argsort(values, kind="stable")
        return values[order], owner[order], share[order]


_NUMBERS_AT_ONCE = 2**21


def mean_score(scores: Scores, weights: Array | None = None) -> Array:
    """Return the weighted mean of the runs' mean scores, [...]."""
    return _weights(scores, weights) @ scores.run_means


def interquartile_mean(scores: Scores, weights: Array | None = None) -> Array:
    """Return the interquartile mean of all runs' scores, [...] (arXiv:2108.13264, section 4.3).

    Scores at the quartiles count in part. scipy's `trim_mean`, which the paper's library uses, drops only whole scores,
    even if their number is not a multiple of 4.
    """
    weights, (values, owner, share) = _weights(scores, weights), scores.ordered
    if weights.ndim > 1 and len(weights) > (block := max(1, _NUMBERS_AT_ONCE // len(values))):  # bounds memory
        return np.concatenate(
            [interquartile_mean(scores, weights[start : start + block]) for start in range(0, len(weights), block)]
        )
    each = weights[..., owner] * share
    above = np.cumsum(each, axis=-1)
    # Rounding errors in the sum of weights would shift the quartiles.
    above /= above[..., -1:]
    below = np.concatenate([np.zeros_like(above[..., :1]), above[..., :-1]], axis=-1)
    middle = np.clip(np.minimum(above, 0.75) - np.maximum(below, 0.25), 0, None)
    return (middle @ values) / middle.sum(axis=-1)


def performance_profile(scores: Scores, thresholds: Array, weights: Array | None = None) -> Array:
    """Return the fraction of scores above each threshold [m], as [..., m] (arXiv:2108.13264, section 4.2, run-score).

    F(tau) is the mean over strata, runs and their tasks of 1[score > tau].
    """
    above = np.array([(run[:, None] > thresholds).mean(axis=0) for run in scores.runs])
    return _weights(scores, weights) @ above


def _weights(scores: Scores, weights: Array | None) -> Array:
    return scores.even_weights if weights is None else weights
