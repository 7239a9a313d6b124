"""Running normalization of observations and rewards, with statistics stored in the learner.

Statistics are constant during an iteration; the update then adds the iteration's episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Params

PREFIX = "normalization."
"""Prefix of all names in this module, in LearnerState.extra and in TaskParams."""
OBSERVATIONS, RETURNS = f"{PREFIX}observations", f"{PREFIX}returns"
"""Prefixes of running statistics in LearnerState.extra."""
MEAN, STD, REWARD_STD = f"{PREFIX}mean", f"{PREFIX}std", f"{PREFIX}reward_std"
"""Names in TaskParams: [B, O], [B, O] and [B]."""

INITIAL_COUNT = 1e-4
EPSILON = 1e-8
CLIP = 10.0
"""Constants of gymnasium's RunningMeanStd and of Stable-Baselines3's VecNormalize."""


@dataclass(frozen=True)
class RunningStatistics:
    """Mean and variance of all rows so far, float64.

    Attributes:
        mean: [...].
        variance: [...].
        count: [], number of rows.
    """

    mean: Array
    variance: Array
    count: Array

    @classmethod
    def initial(cls, shape: tuple[int, ...]) -> RunningStatistics:
        """Return mean 0 and variance 1, with a negligible count."""
        return cls(np.zeros(shape), np.ones(shape), np.array(INITIAL_COUNT))

    @classmethod
    def of(cls, learner: LearnerState, prefix: str) -> RunningStatistics:
        """Return a learner's statistics with this prefix."""
        return cls(*(learner.extra[f"{prefix}.{name}"] for name in ("mean", "variance", "count")))

    def stored(self, prefix: str) -> Params:
        """Return the statistics as learner arrays."""
        return {f"{prefix}.{name}": value for name, value in vars(self).items()}

    def merged(self, rows: Array) -> RunningStatistics:
        """Return the statistics with rows [n, ...] added (Chan et al. 1979)."""
        values = rows.astype(np.float64)
        count = self.count + len(values)
        gap = values.mean(axis=0) - self.mean
        squares = self.variance * self.count + values.var(axis=0) * len(values)
        squares = squares + np.square(gap) * self.count * len(values) / count
        return RunningStatistics(*map(np.asarray, (self.mean + gap * len(values) / count, squares / count, count)))

    @property
    def std(self) -> Array:
        """Standard deviation for dividing, float32."""
        return np.asarray(np.sqrt(self.variance + EPSILON), np.float32)


def merged_observations(statistics: RunningStatistics, rounds: Iterable[EpisodeBatch]) -> RunningStatistics:
    """Add all observations of some episodes, including final ones."""
    for episodes in rounds:
        for observations, real in zip(episodes.observations, _observed(episodes), strict=True):
            statistics = statistics.merged(observations[real])
    return statistics


def merged_returns(statistics: RunningStatistics, rounds: Iterable[EpisodeBatch], discount: float) -> RunningStatistics:
    """Add the discounted sums of rewards up to each step, R_t = γ R_{t-1} + r_t, of some episodes."""
    for episodes in rounds:
        for rewards, mask in zip(episodes.rewards, episodes.mask, strict=True):
            backwards = discounted_returns(np.flip(rewards * mask, -1), discount)
            statistics = statistics.merged(np.flip(backwards, -1)[mask != 0])
    return statistics


@dataclass(frozen=True)
class Normalization:
    """Normalization of an iteration, for B tasks. Quantities that are not normalized are None.

    Attributes:
        mean: [B, O] float32, subtracted from observations.
        std: [B, O] float32, divisor after the mean is subtracted.
        reward_std: [B] float32, divides rewards.
    """

    mean: Array | None = None
    std: Array | None = None
    reward_std: Array | None = None

    @classmethod
    def of_params(cls, params: Mapping[str, Array]) -> Normalization | None:
        """Return the normalization in task parameters; None if there is none."""
        found = [params.get(name) for name in (MEAN, STD, REWARD_STD)]
        return None if all(value is None for value in found) else cls(*found)

    def observations(self, values: Array) -> Array:
        """Normalize observations [B, ..., O]."""
        if self.mean is None or self.std is None:
            return values
        shape = (len(self.mean), *(1,) * (values.ndim - 2), -1)
        found = np.subtract(values, self.mean.reshape(shape), dtype=np.float32)
        found /= self.std.reshape(shape)
        return np.clip(found, -CLIP, CLIP, out=found)

    def rewards(self, values: Array) -> Array:
        """Scale rewards [B, ...]."""
        if self.reward_std is None:
            return values
        found = values / self.reward_std.reshape(-1, *(1,) * (values.ndim - 1))
        return np.clip(found, -CLIP, CLIP, out=found)

    def episodes(self, episodes: EpisodeBatch) -> EpisodeBatch:
        """Normalize episodes of these tasks; padding is zero."""
        observations = self.observations(episodes.observations)
        if self.mean is not None:
            observations *= _observed(episodes)[..., None]
        return replace(episodes, observations=observations, rewards=self.rewards(episodes.rewards))


def without_normalization(params: Mapping[str, Array]) -> Params:
    """Return the arrays without those of the normalization."""
    return {name: value for name, value in params.items() if not name.startswith(PREFIX)}


def _observed(episodes: EpisodeBatch) -> Array:
    """Return a mask [B, E, T+1] bool, True where an episode has an observation."""
    steps = np.arange(episodes.observations.shape[2])
    return (steps <= episodes.lengths[..., None]) & episodes.real[..., None]
