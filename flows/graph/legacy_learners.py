"""Temporary: makes the algorithms of today look like Learners. Goes when they are."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.types import (
    Array,
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
    kind = {"task_inference": _PEARL, "off_policy": OffPolicyLearner, "on_policy": _ActorCritic}[graph_name(config)]
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


class OffPolicyLearner(Learner[Any, Iterable[Minibatch]]):
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

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
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
        return self.algorithm.update(
            self.policy, state, experience, run_seed=run_seed, iteration=iteration, parallel=parallel
        )


class _PEARL(OffPolicyLearner):
    def __init__(self, config: RunConfig, setup: Setup) -> None:
        super().__init__(config, setup)
        self.settings = cast(Any, config.algorithm)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Transitions, *, parallel: ParallelMap = map
    ) -> TaskParams:
        return TaskParams({**params.params, **self.algorithm.infer(state, evidence).params})

    def adapt_to_episodes(
        self,
        state: LearnerState,
        params: TaskParams,
        rounds: Sequence[EpisodeBatch],
        *,
        run_seed: int,
        parallel: ParallelMap = map,
    ) -> TaskParams:
        if sum(batch.rewards.shape[1] for batch in rounds) < self.settings.num_exp_traj_eval:
            return params
        rewards = self.setup.sparse_rewards if self.settings.sparse_rewards else None
        columns, beliefs = TransitionColumns(self.setup.observation_size, self.setup.action_size), []
        for b in range(len(rounds[0].rewards)):
            context = columns.unpack(np.concatenate([_rows_of_task(columns, e, b) for e in rounds])[None])
            if rewards is not None:
                context = replace(context, rewards=rewards(context.rewards))
            beliefs.append(self.algorithm.infer(state, context).params)
        belief = {name: np.concatenate([one[name] for one in beliefs]) for name in beliefs[0]}
        return TaskParams({**params.params, **belief})


def _rows_of_task(columns: TransitionColumns, episodes: EpisodeBatch, b: int) -> Array:
    e, t = np.nonzero(episodes.mask[b])
    return columns.pack(episodes, np.full_like(e, b), e, t)


def draw_context(
    config: RunConfig,
    rounds: Sequence[EpisodeBatch],
    i: int,
    k: int,
    rewards: Callable[[Array], Array] | None,
) -> Transitions:
    """[B, C] transitions of every task, drawn from rounds of episodes."""
    first, count = rounds[0], cast(Any, config.algorithm).embedding_batch_size
    columns, drawn = TransitionColumns(first.observations.shape[-1], first.actions.shape[-1]), []
    for b in range(len(first.rewards)):
        seen = np.concatenate([_rows_of_task(columns, episodes, b) for episodes in rounds])
        rng = generator(config.seed, "context", i, k, b)
        drawn.append(seen[rng.choice(len(seen), count, replace=len(seen) < count)])
    context = columns.unpack(np.stack(drawn))
    return context if rewards is None else replace(context, rewards=rewards(context.rewards))


@dataclass(frozen=True)
class Filling:
    actor: ActorKind
    steps: int | None = None
    episodes: int | None = None


@dataclass(frozen=True)
class CollectionRound:
    episodes: int
    from_posterior: bool = False
    in_context: bool = False


@dataclass(frozen=True)
class OffPolicyPlan:
    filling: Filling
    rounds: tuple[CollectionRound, ...]
    num_updates: int | None
    tasks_per_gradient_step: int
    batch_size: int
    context_size: int
    memory_size: int
    scores_sparse_rewards: bool = False

    def gradient_steps(self, num_env_steps: int) -> int:
        return num_env_steps if self.num_updates is None else self.num_updates

    def most_transitions(self, *, iterations: int, num_tasks: int, all_tasks: int, max_episode_steps: int) -> int:
        filled = 2 * (self.filling.steps or 0) + (all_tasks * (self.filling.episodes or 0) + 1) * max_episode_steps
        collected = num_tasks * sum(part.episodes for part in self.rounds) * max_episode_steps
        return min(self.memory_size * all_tasks, filled + iterations * collected)


def off_policy_plan(config: RunConfig) -> OffPolicyPlan:
    """What an off-policy run collects, and what its gradient steps draw."""
    a = cast(Any, config.algorithm)
    if graph_name(config) == "off_policy":
        filling = Filling(a.actor if a.use_trained_policy_for_refill else "uniform", steps=a.init_memory_steps)
        rounds = (CollectionRound(config.episodes_per_task),)
        return OffPolicyPlan(filling, rounds, a.num_updates_per_step, 1, a.batch_size, 0, a.memory_size)
    T = config.max_episode_steps
    return OffPolicyPlan(
        Filling(a.actor, episodes=a.initial_episodes(T)),
        tuple(CollectionRound(r.episodes, r.from_posterior, r.in_context) for r in a.rounds(T)),
        a.num_updates,
        a.meta_batch_size,
        a.batch_size,
        a.embedding_batch_size,
        a.memory_size,
        a.sparse_rewards,
    )
