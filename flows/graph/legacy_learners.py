"""Temporary: makes the algorithms of today look like Learners. Goes when they are."""

from collections.abc import Sequence
from typing import Any, cast

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, Learner, Setup
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import (
    EpisodeBatch,
    LearnerState,
    Metrics,
    ParallelMap,
    Samples,
    Step,
    TaskParams,
)
from metaloom.stages.process_samples import process_samples


def graph_name(config: RunConfig) -> str:
    """The table of stages that a run follows."""
    return config.algorithm.graph if isinstance(config.algorithm, AlgorithmSettings) else "on_policy"


def build_learner(config: RunConfig, setup: Setup) -> Learner[Any, Any]:
    """The learner of a run."""
    return config.algorithm.build(setup) if isinstance(config.algorithm, AlgorithmSettings) else _MAML(config, setup)


def _gaussian(config: RunConfig, setup: Setup) -> GaussianPolicy:
    return GaussianPolicy(setup.observation_size, setup.action_size, config.policy)


class _MAML(Learner[Step, Sequence[Step]]):
    def __init__(self, config: RunConfig, setup: Setup) -> None:
        if setup.num_actions:
            raise ConfigError(
                f"algorithm.name is {config.algorithm.name}, which is for actions that are numbers, but those of "
                f"{setup.env_name} are Discrete({setup.num_actions}); required a2c, ppo, ppo2, svpg or dql"
            )
        self.algorithm = cast(Any, config.build_algorithm())
        self.policy = _gaussian(config, setup)
        self.setup = setup

    def initialize(self, *, run_seed: int) -> LearnerState:
        return self.algorithm.initialize(self.policy, run_seed=run_seed)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        baseline = self.setup.baseline.build()
        return process_samples(episodes, baseline, self.setup.processing, seed=seed, parallel=parallel)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Step, *, parallel: ParallelMap = map
    ) -> TaskParams:
        return self.algorithm.adapt(self.policy, state, params, evidence, parallel=parallel)

    def adapt_to_episodes(
        self,
        state: LearnerState,
        params: TaskParams,
        rounds: Sequence[EpisodeBatch],
        *,
        run_seed: int,
        parallel: ParallelMap = map,
    ) -> TaskParams:
        k = len(rounds) - 1
        samples = self.process(state, rounds[-1], seed=seed_for(run_seed, "baseline", 0, k), parallel=parallel)
        step = Step(rounds[-1], samples, min(k, self.algorithm.inner_steps - 1))
        return self.adapt(state, params, step, parallel=parallel)

    def update(
        self,
        state: LearnerState,
        experience: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        return self.algorithm.optimize(
            self.policy, state, experience, run_seed=run_seed, iteration=iteration, parallel=parallel
        )
