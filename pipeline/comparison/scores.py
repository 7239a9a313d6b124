"""Scores of a group of runs, in which every run counts the same whatever it was tested on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Scores:
    """Scores of R runs.

    Attributes:
        runs: of every run, its scores [B_r], one per task; at least one.
        strata: of every run, what it was tested in. Resampling keeps the number of runs of each, and each counts the
            same. A group that was tested in one environment has one stratum.
        same_tasks: whether task b of all runs of a stratum is the same task.
    """

    runs: tuple[Array, ...]
    strata: tuple[str, ...]
    same_tasks: bool = False

    def __post_init__(self) -> None:
        if not self.runs or len(self.runs) != len(self.strata):
            raise ValueError(
                f"found scores of {len(self.runs)} runs and strata of {len(self.strata)}; required one each, at least"
            )
        for place, run in enumerate(self.runs):
            if run.ndim != 1 or not len(run) or not np.isfinite(run).all():
                raise ValueError(f"found scores of run {place}: {run!r}; required finite numbers [B], at least one")
        if self.same_tasks and any(
            len({len(run) for run in self.of_stratum(name)}) > 1 for name in dict.fromkeys(self.strata)
        ):
            raise ValueError("found runs with different numbers of scores; required as many, for the same tasks")

    @classmethod
    def of(cls, values: Sequence[Sequence[float]] | Array, *, same_tasks: bool = False) -> "Scores":
        """Scores [R, B] of runs in one environment; rows may differ in length."""
        rows = tuple(np.asarray(row, np.float64) for row in cast(Sequence[Array], values))
        return cls(rows, ("",) * len(rows), same_tasks)

    def __len__(self) -> int:
        return len(self.runs)

    def __add__(self, other: "Scores") -> "Scores":
        """The runs of both groups, those of this one first."""
        return Scores(self.runs + other.runs, self.strata + other.strata, self.same_tasks and other.same_tasks)

    @property
    def stratum_names(self) -> list[str]:
        """The strata, in order."""
        return sorted(set(self.strata))

    def places(self, stratum: str) -> Array:
        """Places of the runs of a stratum."""
        return np.flatnonzero(np.array(self.strata) == stratum)

    def of_stratum(self, stratum: str) -> list[Array]:
        """Scores of the runs of a stratum."""
        return [run for run, name in zip(self.runs, self.strata, strict=True) if name == stratum]

    @cached_property
    def even_weights(self) -> Array:
        """[R], adding up to 1: strata count the same, and so do the runs of each."""
        names = self.stratum_names
        return np.array([1 / (len(names) * self.strata.count(name)) for name in self.strata])

    @cached_property
    def run_means(self) -> Array:
        """[R], the mean score of every run."""
        return np.array([run.mean() for run in self.runs])

    @cached_property
    def ordered(self) -> tuple[Array, Array, Array]:
        """All scores in ascending order [n], the run of each [n], and its share of that run [n]."""
        values = np.concatenate(self.runs)
        owner = np.repeat(np.arange(len(self)), [len(run) for run in self.runs])
        share = np.concatenate([np.full(len(run), 1 / len(run)) for run in self.runs])
        order = np.argsort(values, kind="stable")
        return values[order], owner[order], share[order]
