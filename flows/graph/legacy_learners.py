"""Temporary: makes the algorithms of today look like Learners. Goes when they are."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import (
    EpisodeBatch,
    LearnerState,
    Metrics,
    Minibatch,
    ParallelMap,
    Samples,
    Step,
    TaskParams,
    Transitions,
)
from metaloom.stages.process_samples import process_samples


def graph_name(config: RunConfig) -> str:
    """The table of stages that a run follows."""
    algorithm = cast(Any, config.algorithm)
    if getattr(algorithm, "infers_tasks", False):
        return "task_inference"
    return "off_policy" if getattr(algorithm, "off_policy", False) else "on_policy"


def build_learner(config: RunConfig, setup: Setup) -> Learner[Any, Any]:
    """The learner of a run."""
    kind: Callable[[RunConfig, Setup], Learner[Any, Any]]
    kind = {"task_inference": _PEARL, "off_policy": _OffPolicy, "on_policy": _ActorCritic}[graph_name(config)]
    if kind is _ActorCritic and not config.has_critic:
        kind = _MAML
    return kind(config, setup)


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


class _ActorCritic(Learner[Step, Sequence[Step]]):
    def __init__(self, config: RunConfig, setup: Setup) -> None:
        if setup.num_actions and (options := config.policy.std_options):
            raise ConfigError(
                f"policy: {options} is about a standard deviation, but the actions are Discrete({setup.num_actions}); "
                "leave it out"
            )
        self.algorithm = cast(Any, config.build_algorithm())
        self.policy = _gaussian(config, setup)
        if setup.num_actions:
            self.policy = CategoricalPolicy(setup.observation_size, setup.num_actions, config.policy)

    def initialize(self, *, run_seed: int) -> LearnerState:
        return self.algorithm.initialize(self.policy, run_seed=run_seed)

    def at_start(self, state: LearnerState, *, run_seed: int) -> LearnerState:
        return self.algorithm.begun(self.policy, state, run_seed=run_seed)

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return self.algorithm.acting_params(state, num_tasks)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        return self.algorithm.estimate(state, episodes)

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


class _OffPolicy(Learner[Any, Iterable[Minibatch]]):
    def __init__(self, config: RunConfig, setup: Setup) -> None:
        name, chooses = config.algorithm.name, bool(setup.num_actions)
        if chooses != (name == "dql"):
            kind, others = ("choices", "sac or pearl") if name == "dql" else ("numbers", "dql, a2c, ppo, ppo2 or svpg")
            raise ConfigError(
                f"algorithm.name is {name}, which is for actions that are {kind}, but those of {setup.env_name} are "
                f"not; required {others}"
            )
        self.algorithm = cast(Any, config.build_algorithm())
        self.setup = setup
        self.policy = OffPolicyPolicy(setup.observation_size, setup.action_size, setup.num_actions, config.policy)

    def initialize(self, *, run_seed: int) -> LearnerState:
        return self.algorithm.initialize(self.policy, run_seed=run_seed)

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return self.algorithm.acting_params(state, num_tasks)

    def refill_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return self.algorithm.refill_params(state, num_tasks)

    def update(
        self,
        state: LearnerState,
        experience: Iterable[Minibatch],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        # Parameters that are not finite are found at the end, and told better than by a warning.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.algorithm.update(
                self.policy, state, experience, run_seed=run_seed, iteration=iteration, parallel=parallel
            )


class _PEARL(_OffPolicy):
    def __init__(self, config: RunConfig, setup: Setup) -> None:
        super().__init__(config, setup)
        self.settings = cast(Any, config.algorithm)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Transitions, *, parallel: ParallelMap = map
    ) -> TaskParams:
        return TaskParams({**params.params, **self.algorithm.infer(state, evidence).params})
