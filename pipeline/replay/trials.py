"""Trials of the last iterations, from which a model of them learns: a view of a run's stored data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.types import Array, Step


class TrialBuffer:
    """Finds trials by index, oldest rollout batch first; a batch is read when one of its trials is drawn.

    Args:
        counts: Number of trials of every rollout batch, oldest first.
        read: Reads the trials of a rollout batch by its index.
    """

    def __init__(self, counts: Sequence[int], read: Callable[[int], Trials]) -> None:
        self._ends, self._read = [*accumulate(counts)], read

    def __len__(self) -> int:
        """Return the number of trials."""
        return self._ends[-1]

    def take(self, numbers: Array) -> list[tuple[Trials, int]]:
        """Return the batch of each of some trials [n], and its index there."""
        rounds = np.searchsorted(self._ends, numbers, side="right")
        begins = np.array([0, *self._ends])[rounds]
        return [(self._read(r), p) for r, p in zip(rounds.tolist(), (numbers - begins).tolist(), strict=True)]


@dataclass(frozen=True)
class TrialExperience:
    """Experience of an update."""

    step: Step
    buffer: TrialBuffer
