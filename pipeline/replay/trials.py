"""Trials of recent iterations for training a model, as a view of a run's stored data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.types import Array, Step


class TrialBuffer:
    """Sequence of trials, oldest rollout batch first. Batches are read when one of their trials is drawn.

    Args:
        counts: Number of trials of every rollout batch, oldest first.
        read: Function that reads the trials of a rollout batch by index.
    """

    def __init__(self, counts: Sequence[int], read: Callable[[int], Trials]) -> None:
        self._ends, self._read = [*accumulate(counts)], read

    def __len__(self) -> int:
        """Return the number of trials."""
        return self._ends[-1]

    def take(self, numbers: Array) -> list[tuple[Trials, int]]:
        """Return the batch and the index in it for trials [n]."""
        rounds = np.searchsorted(self._ends, numbers, side="right")
        begins = np.array([0, *self._ends])[rounds]
        return [(self._read(r), p) for r, p in zip(rounds.tolist(), (numbers - begins).tolist(), strict=True)]


@dataclass(frozen=True)
class TrialExperience:
    """Experience of VariBAD's update: this iteration's step, and the buffer."""

    step: Step
    buffer: TrialBuffer
