"""Shifting and scaling advantages, by the statistics of one iteration or of all steps so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import EPSILON, shift_positive
from metaloom.pipeline.types import Array, LearnerState, Params

RUNNING = "advantage_moments"
"""Name in the learner of the running count, mean and sum of squared deviations, [3] float64."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers seen so far (Welford; merged after Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, values: Array) -> Moments:
        """With some more numbers, each counted."""
        count, mean = len(values), float(values.mean())
        total, gap = self.count + count, mean - self.mean
        squares = float(np.square(values - mean).sum())
        return Moments(
            total,
            self.mean + gap * count / total,
            self.squares + squares + gap**2 * self.count * count / total,
        )

    @property
    def std(self) -> float:
        """Standard deviation of all numbers."""
        return float(np.sqrt(self.squares / self.count))

    def stored(self) -> Params:
        """As arrays of a learner."""
        return {RUNNING: np.array([self.count, self.mean, self.squares])}

    @classmethod
    def of(cls, learner: LearnerState) -> Moments | None:
        """Those that a learner keeps, if it does."""
        return cls(*learner.extra[RUNNING].tolist()) if RUNNING in learner.extra else None


def scaled(advantages: Array, mask: Array, processing: ProcessingConfig, running: Moments | None) -> Array:
    """Advantages [b, E, T] as `processing` asks for them: task by task, or by running moments that include them."""
    if running is None:
        return np.stack([scale(task, real, processing) for task, real in zip(advantages, mask, strict=True)])
    if processing.normalize_advantages:
        advantages = (advantages - running.mean) / (running.std + EPSILON) * mask
    if processing.positive_advantages:
        advantages = np.stack([shift_positive(*task) for task in zip(advantages, mask, strict=True)])
    return advantages
