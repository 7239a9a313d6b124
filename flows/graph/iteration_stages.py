"""What every kind of run offers: the stages of an iteration, what each reads, and how each is computed.

Training, resuming, replaying and all that asks a stored run again go through `IterationStages.compute`; they differ
only in where inputs come from and what is done with the output.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from metaloom.flows.graph.setup import learner_setup
from metaloom.flows.graph.warm_start import read_learner
from metaloom.flows.rollouts.workers import RolloutWorkers
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.types import (
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Minibatches,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.stages.evaluate import Tested, by_learner, evaluate, unseen
from metaloom.stages.initialize import initialize
from metaloom.storage import Run, StageRef, learner_ref

Load = Callable[[StageRef], Any]
StageOutput = TaskBatch | EpisodeBatch | Samples | TaskParams | Minibatches | Update | Evaluation


@dataclass(frozen=True)
class IterationStages(ABC):
    """One run's stages, ready to be computed in any order in which their inputs are at hand.

    Attributes:
        config: the run's settings.
        algorithm: as the stages use it.
        policy: what acts.
        env: one environment of the run, for its spaces and tasks.
        rollouts: where episodes are collected.
        parallel: maps over chunks of tasks; no result depends on it.
        run: the run as it was stored before; None for a new one.
    """

    config: RunConfig
    algorithm: Any
    policy: Any
    env: Any
    rollouts: RolloutWorkers
    parallel: Callable[..., Iterator[Any]]
    run: Run | None = None

    last_stage: ClassVar[str]
    """The stage that ends an iteration: its output is the next learner."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        rollouts: RolloutWorkers,
        parallel: Callable[..., Iterator[Any]],
        run: Run | None = None,
    ) -> Self:
        """The stages of a run with this configuration."""
        env = make_env(config.env)
        if config.evaluation.every is not None:
            # What is wrong with the tasks of the last evaluation is known before the first iteration.
            evaluation_tasks(config, env, config.iterations)
        policy = cls.build_policy(config, env)
        return cls(config, build_learner(config, env), policy, env, rollouts, parallel, run)

    @staticmethod
    @abstractmethod
    def build_policy(config: RunConfig, env: Any) -> Any:
        """The policy that fits an environment's actions.

        Raises:
            ConfigError: the algorithm or an option is not for such actions.
        """

    @staticmethod
    @abstractmethod
    def stage_order(config: RunConfig, iteration: int) -> list[StageRef]:
        """The stages of an iteration in the order in which they run."""

    @abstractmethod
    def inputs(self, ref: StageRef) -> list[StageRef]:
        """The stages whose outputs a stage reads."""

    @abstractmethod
    def compute(self, ref: StageRef, load: Load) -> StageOutput:
        """A stage's output, from the inputs that `load` brings."""

    @abstractmethod
    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What every task acts with before anything is known about it."""

    def under(self, config: RunConfig) -> Self:
        """The same stages under settings that leave environment and policy as they are."""
        return replace(self, config=config, algorithm=build_learner(config, self.env))

    def order(self, iteration: int) -> list[StageRef]:
        """The stages of an iteration in the order in which they run."""
        return self.stage_order(self.config, iteration)

    def learner_ref(self, iteration: int) -> StageRef:
        """The stage whose output is the learner that an iteration starts from."""
        return learner_ref(iteration, self.last_stage)

    def seed_position(self, ref: StageRef) -> tuple[int, ...]:
        """Where in the run's random streams a stage draws."""
        if ref.stage == "evaluate":
            # Equal tasks and episodes in every evaluation make them comparable.
            return (self.config.seed, self.config.evaluation.seed)
        return (self.config.seed, ref.iteration, ref.step)

    def begun(self, learner: LearnerState) -> LearnerState:
        """A stored learner as the iteration behind it acts and learns with it."""
        return learner

    def initialize(self) -> Update:
        """The learner before the first iteration."""
        start = None if self.config.init_from is None else read_learner(self.config.init_from)
        return initialize(self.policy, self.algorithm, run_seed=self.config.seed, start=start)

    def evaluate(self, learner: LearnerState, updates: int, tested: Tested = unseen) -> Evaluation:
        """How a learner that has had so many updates does, as the configuration's evaluation section says.

        Args:
            learner: the learner.
            updates: that it has had.
            tested: is shown the test episodes after each number of adaptation steps.
        """
        plan = EvaluationPlan.of(self.config)
        tasks = evaluation_tasks(self.config, self.env, updates)
        return evaluate(
            self.acting_params(learner, len(tasks)),
            tasks,
            adaptation_steps=plan.adaptation_steps,
            adaptation_rollouts=self.rollouts.sampling(plan.episodes, deterministic=False).collect,
            test_rollouts=self.rollouts.sampling(plan.test_episodes, deterministic=plan.deterministic).collect,
            adapted=by_learner(self.algorithm, learner, run_seed=plan.run_seed, parallel=self.parallel),
            run_seed=plan.run_seed,
            tested=tested,
        )


def build_learner(config: RunConfig, env: MetaEnv) -> Any:
    """The learner of a run, or what does its work in algorithms that are none yet."""
    if isinstance(config.algorithm, AlgorithmSettings):
        return config.algorithm.build(learner_setup(config, env))
    return config.build_algorithm()


def evaluation_refs(config: RunConfig, iteration: int) -> list[StageRef]:
    """The evaluation behind an iteration, where there is one."""
    every = config.evaluation.every
    return [StageRef(iteration, "evaluate", 0)] if every is not None and (iteration + 1) % every == 0 else []


def observation_size(env: Any) -> int:
    """O."""
    return math.prod(env.observation_space.shape or ())
