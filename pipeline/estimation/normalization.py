"""Running normalization of observations and rewards. Statistics are constant during an iteration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Params

PREFIX = "normalization."  # prefix of this module's names in LearnerState.extra and in TaskParams
OBSERVATIONS, RETURNS = f"{PREFIX}observations", f"{PREFIX}returns"
"""Name prefixes of running statistics in LearnerState.extra."""
MEAN, STD, REWARD_STD = f"{PREFIX}mean", f"{PREFIX}std", f"{PREFIX}reward_std"
"""Names of the normalization arrays in TaskParams: [B, O], [B, O] and [B]."""

INITIAL_COUNT = 1e-4
EPSILON = 1e-8
CLIP = 10.0  # constants of gymnasium's RunningMeanStd and of Stable-Baselines3's VecNormalize


@dataclass(frozen=True)
class RunningStatistics:
    """Mean and variance of all rows [...] so far, in float64."""

    mean: Array
    variance: Array
    count: Array  # number of rows, a scalar

    @classmethod
    def initial(cls, shape: tuple[int, ...]) -> "RunningStatistics":
        """Return statistics with mean 0, variance 1 and a negligible count."""
        return cls(np.zeros(shape), np.ones(shape), np.array(INITIAL_COUNT))

    @classmethod
    def of(cls, learner: LearnerState, prefix: str) -> "RunningStatistics":
        """Return the statistics stored in a learner state under this prefix."""
        return cls(*(learner.extra[f"{prefix}.{name}"] for name in ("mean", "variance", "count")))

    def stored(self, prefix: str) -> Params:
        """Return the statistics as arrays for LearnerState.extra."""
        return {f"{prefix}.{name}": value for name, value in vars(self).items()}

    def merged(self, rows: Array) -> "RunningStatistics":
        """Return the statistics updated with rows [n, ...] (Chan et al. 1979)."""
        values = rows.astype(np.float64)
        count = self.count + len(values)
        gap = values.mean(axis=0) - self.mean
        squares = self.variance * self.count + values.var(axis=0) * len(values)
        squares = squares + np.square(gap) * self.count * len(values) / count
        return RunningStatistics(*map(np.asarray, (self.mean + gap * len(values) / count, squares / count, count)))

    @property
    def std(self) -> Array:
        """Standard deviation to divide by, float32."""
        return np.asarray(np.sqrt(self.variance + EPSILON), np.float32)


def merged_observations(statistics: RunningStatistics, rounds: Iterable[EpisodeBatch]) -> RunningStatistics:
    """Return the statistics updated with all observations of some episodes, including final observations."""
    for episodes in rounds:
        for observations, real in zip(episodes.observations, _observed(episodes), strict=True):
            statistics = statistics.merged(observations[real])
    return statistics


def merged_returns(statistics: RunningStatistics, rounds: Iterable[EpisodeBatch], discount: float) -> RunningStatistics:
    """Return the statistics updated with the discounted sums R_t = γ R_{t-1} + r_t of rewards up to each step."""
    for episodes in rounds:
        for rewards, mask in zip(episodes.rewards, episodes.mask, strict=True):
            backwards = discounted_returns(np.flip(rewards * mask, -1), discount)
            statistics = statistics.merged(np.flip(backwards, -1)[mask != 0])
    return statistics


@dataclass(frozen=True)
class Normalization:
    """Normalization for an iteration and B tasks. Statistics of quantities that are not normalized are None."""

    mean: Array | None = None  # mean of observations, [B, O] float32
    std: Array | None = None  # divisor of centered observations, [B, O] float32
    reward_std: Array | None = None  # divisor of rewards, [B] float32

    @classmethod
    def of_params(cls, params: Mapping[str, Array]) -> "Normalization | None":
        """Return the normalization stored in task parameters, or None if there is none."""
        found = [params.get(name) for name in (MEAN, STD, REWARD_STD)]
        return None if all(value is None for value in found) else cls(*found)

    def observations(self, values: Array) -> Array:
        """Return observations [B, ..., O], normalized and clipped, or unchanged without statistics."""
        if self.mean is None or self.std is None:
            return values
        shape = (len(self.mean), *(1,) * (values.ndim - 2), -1)
        found = np.subtract(values, self.mean.reshape(shape), dtype=np.float32)
        found /= self.std.reshape(shape)
        return np.clip(found, -CLIP, CLIP, out=found)

    def rewards(self, values: Array) -> Array:
        """Return rewards [B, ...], scaled and clipped, or unchanged without statistics."""
        if self.reward_std is None:
            return values
        found = values / self.reward_std.reshape(-1, *(1,) * (values.ndim - 1))
        return np.clip(found, -CLIP, CLIP, out=found)

    def episodes(self, episodes: EpisodeBatch) -> EpisodeBatch:
        """Return normalized episodes of these tasks, with zero padding."""
        observations = self.observations(episodes.observations)
        if self.mean is not None:
            observations *= _observed(episodes)[..., None]
        return replace(episodes, observations=observations, rewards=self.rewards(episodes.rewards))


def without_normalization(params: Mapping[str, Array]) -> Params:
    """Return all arrays except the normalization arrays."""
    return {name: value for name, value in params.items() if not name.startswith(PREFIX)}


def _observed(episodes: EpisodeBatch) -> Array:
    """Return a mask of the real observations of each episode, [B, E, T+1] bool."""
    steps = np.arange(episodes.observations.shape[2])
    return (steps <= episodes.lengths[..., None]) & episodes.real[..., None]
