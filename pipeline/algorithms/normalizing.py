"""A wrapper that normalizes observations and rewards for any algorithm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import Kernel, Learner, Setup, Steps
from metaloom.pipeline.estimation.normalization import (
    MEAN,
    OBSERVATIONS,
    PREFIX,
    RETURNS,
    REWARD_STD,
    STD,
    Normalization,
    RunningStatistics,
    merged_observations,
    merged_returns,
    without_normalization,
)
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, ParallelMap, Params, Samples, Step, TaskParams


class NormalizingLearner(Learner[Any, Steps]):
    """Learner that passes normalized episodes to another learner and keeps running statistics in its state."""

    def __init__(self, inner: Learner[Any, Steps], setup: Setup) -> None:
        if setup.policy.normalize_observations and setup.observation_scale != 1:
            raise ConfigError(
                f"policy.normalize_observations is on, but the observations of {setup.env_name} are bytes, which are "
                f"divided by {setup.observation_scale:g}; turn it off"
            )
        self.inner: Learner[Any, Steps] = inner
        self._discount = setup.processing.discount
        self.kernel: Kernel = inner.kernel
        self._shapes: dict[str, tuple[int, ...]] = {}
        if setup.policy.normalize_observations:
            self._shapes[OBSERVATIONS] = (setup.observation_size,)
        if setup.processing.scale_rewards:
            self._shapes[RETURNS] = ()

    @property
    def unwrapped(self) -> Learner[Any, Steps]:
        return self.inner

    def initialize(self, *, run_seed: int) -> LearnerState:
        state = self.inner.initialize(run_seed=run_seed)
        initial = {prefix: RunningStatistics.initial(shape) for prefix, shape in self._shapes.items()}
        return _with_statistics(state, initial)

    def at_start(self, state: LearnerState, *, run_seed: int) -> LearnerState:
        found = self.inner.at_start(_inner(state), run_seed=run_seed)
        return _with_statistics(found, self._statistics(state))

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        params = self.inner.acting_params(_inner(state), num_tasks)
        return TaskParams(params.params | TaskParams.broadcast(self._normalization(state), num_tasks).params)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        return self.inner.process(_inner(state), self._normalized(state, episodes), seed=seed, parallel=parallel)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Step | EpisodeBatch, *, parallel: ParallelMap = map
    ) -> TaskParams:
        if isinstance(evidence, Step):
            seen = replace(evidence, episodes=self._normalized(state, evidence.episodes))
        else:
            seen = self._normalized(state, evidence)
        kept = {name: value for name, value in params.params.items() if name.startswith(PREFIX)}
        of_policy = TaskParams(without_normalization(params.params))
        return TaskParams(self.inner.adapt(_inner(state), of_policy, seen, parallel=parallel).params | kept)

    def update(
        self, state: LearnerState, experience: Steps, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        """Update the algorithm with the current statistics, then add this iteration's episodes to the statistics."""
        normalized = [replace(step, episodes=self._normalized(state, step.episodes)) for step in experience]
        found, metrics = self.inner.update(
            _inner(state), normalized, run_seed=run_seed, iteration=iteration, parallel=parallel
        )
        rounds, statistics = [step.episodes for step in experience], self._statistics(state)
        if OBSERVATIONS in statistics:
            statistics[OBSERVATIONS] = merged_observations(statistics[OBSERVATIONS], rounds)
        if RETURNS in statistics:
            metrics = {**metrics, "reward_std": float(statistics[RETURNS].std)}
            statistics[RETURNS] = merged_returns(statistics[RETURNS], rounds, self._discount)
        return _with_statistics(found, statistics), metrics

    def _statistics(self, state: LearnerState) -> dict[str, RunningStatistics]:
        return {prefix: RunningStatistics.of(state, prefix) for prefix in self._shapes}

    def _normalization(self, state: LearnerState) -> Params:
        """Return the normalization arrays that all tasks share, without a task axis, keyed by name in TaskParams."""
        statistics, found = self._statistics(state), Params()
        if observations := statistics.get(OBSERVATIONS):
            found |= {MEAN: observations.mean.astype(np.float32), STD: observations.std}
        if returns := statistics.get(RETURNS):
            found[REWARD_STD] = returns.std
        return found

    def _normalized(self, state: LearnerState, episodes: EpisodeBatch) -> EpisodeBatch:
        params = TaskParams.broadcast(self._normalization(state), len(episodes.lengths))
        normalization = Normalization.of_params(params.params)
        assert normalization is not None, "no other learner is wrapped"
        return normalization.episodes(episodes)


def _inner(state: LearnerState) -> LearnerState:
    return replace(state, extra=without_normalization(state.extra))


def _with_statistics(state: LearnerState, statistics: Mapping[str, RunningStatistics]) -> LearnerState:
    stored = {name: value for prefix, found in statistics.items() for name, value in found.stored(prefix).items()}
    return replace(state, extra=state.extra | stored)
