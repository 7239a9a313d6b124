"""The stages of an on-policy meta-training run: their order, what each reads, and how each is computed.

    learner --+--> sample_tasks --> collect_rollouts(0) --> process_samples(0) --> adapt(0) --> collect_rollouts(1) ...
              |                                                                                        |
              +------------------ meta_optimize(all steps) <------------------ process_samples(K) <----+--> next learner
                                                                                  every n iterations:  evaluate

Training, resuming and replaying all go through `OnPolicyStages.compute`; they differ only in where inputs come from
and what is done with the output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from flows.warm_start import read_learner
from flows.workers import RolloutWorkers
from pipeline.algorithms import Algorithm
from pipeline.algorithms.actor_critic.learner import ActorCriticLearner
from pipeline.config import ConfigError, RunConfig
from pipeline.envs import MetaEnv, make_env
from pipeline.evaluation import EvaluationPlan, evaluation_tasks
from pipeline.policies.categorical import CategoricalPolicy
from pipeline.policies.gaussian import GaussianPolicy
from pipeline.seeding import seed_for
from pipeline.types import EpisodeBatch, Evaluation, LearnerState, Samples, Step, TaskBatch, TaskParams, Update
from stages.adapt import adapt
from stages.collect_rollouts import RolloutPosition
from stages.evaluate import evaluate
from stages.initialize import initialize
from stages.meta_optimize import meta_optimize
from stages.process_samples import process_samples, process_with_critic
from stages.sample_tasks import sample_tasks
from storage import StageRef, learner_ref

Load = Callable[[StageRef], Any]
StageOutput = TaskBatch | EpisodeBatch | Samples | TaskParams | Update | Evaluation


@dataclass(frozen=True)
class OnPolicyStages:
    """One run's stages, ready to be computed in any order in which their inputs are at hand."""

    config: RunConfig
    algorithm: Algorithm
    policy: Any
    env: Any
    rollouts: RolloutWorkers
    parallel: Callable[..., Iterator[Any]]

    @classmethod
    def build(
        cls, config: RunConfig, rollouts: RolloutWorkers, parallel: Callable[..., Iterator[Any]]
    ) -> "OnPolicyStages":
        """The stages of a run with this configuration."""
        env = make_env(config.env)
        if config.evaluation.every is not None:
            # What is wrong with the tasks of the last evaluation is known before the first iteration.
            evaluation_tasks(config, env, config.iterations)
        return cls(config, config.build_algorithm(), build_policy(config, env), env, rollouts, parallel)

    def under(self, config: RunConfig) -> "OnPolicyStages":
        """The same stages under settings that leave environment and policy as they are."""
        return replace(self, config=config, algorithm=config.build_algorithm())

    def order(self, iteration: int) -> list[StageRef]:
        """The stages of an iteration in the order in which they run."""
        return stage_order(self.config, iteration)

    def inputs(self, ref: StageRef) -> list[StageRef]:
        """The stages whose outputs a stage reads."""
        i, k = ref.iteration, ref.step
        match ref.stage:
            case "initialize" | "sample_tasks":
                return []
            case "collect_rollouts":
                return [self._acting_params(i, k), StageRef(i, "sample_tasks", 0)]
            case "process_samples":
                critic = [learner_ref(i)] if isinstance(self.algorithm, ActorCriticLearner) else []
                return [*critic, StageRef(i, "collect_rollouts", k)]
            case "adapt":
                before = [] if k == 0 else [StageRef(i, "adapt", k - 1)]
                return [learner_ref(i), *before, *self._step_refs(i, k)]
            case "meta_optimize":
                rounds = range(self.algorithm.inner_steps + 1)
                return [learner_ref(i), *(ref for k in rounds for ref in self._step_refs(i, k))]
            case "evaluate":
                return [StageRef(i, "meta_optimize", 0)]
            case _:
                raise ValueError(f"no stage is called {ref.stage!r}")

    def seed_position(self, ref: StageRef) -> tuple[int, ...]:
        """Where in the run's random streams a stage draws."""
        if ref.stage == "evaluate":
            # Equal tasks and episodes in every evaluation make them comparable.
            return (self.config.seed, self.config.evaluation.seed)
        return (self.config.seed, ref.iteration, ref.step)

    def compute(self, ref: StageRef, load: Load) -> StageOutput:
        """A stage's output, from the inputs that `load` brings."""
        match ref.stage:
            case "initialize":
                start = None if self.config.init_from is None else read_learner(self.config.init_from)
                return initialize(self.policy, self.algorithm, run_seed=self.config.seed, start=start)
            case "sample_tasks":
                return sample_tasks(
                    self.env, num_tasks=self.config.num_tasks, run_seed=self.config.seed, iteration=ref.iteration
                )
            case "collect_rollouts":
                return self._collect_rollouts(ref, load)
            case "process_samples":
                return self._process_samples(ref, load)
            case "adapt":
                return self._adapt(ref, load)
            case "meta_optimize":
                return self._meta_optimize(ref, load)
            case "evaluate":
                return self.evaluate(load(StageRef(ref.iteration, "meta_optimize", 0)).learner, ref.iteration + 1)
            case _:
                raise ValueError(f"no stage is called {ref.stage!r}")

    def evaluate(self, learner: LearnerState, updates: int) -> Evaluation:
        """How a learner that has had so many updates does, as the configuration's evaluation section says."""
        plan = EvaluationPlan.of(self.config)
        tasks = evaluation_tasks(self.config, self.env, updates)
        return evaluate(
            self.policy,
            self.algorithm,
            learner,
            acting_params(self.algorithm, learner, len(tasks)),
            tasks,
            adaptation_steps=plan.adaptation_steps,
            adaptation_rollouts=self.rollouts.sampling(plan.episodes, deterministic=False).collect,
            test_rollouts=self.rollouts.sampling(plan.test_episodes, deterministic=plan.deterministic).collect,
            baseline=self.config.baseline.build,
            processing=self.config.processing,
            run_seed=plan.run_seed,
            parallel=self.parallel,
        )

    def begun(self, learner: LearnerState) -> LearnerState:
        """A stored learner as the iteration behind it acts and learns with it."""
        if isinstance(self.algorithm, ActorCriticLearner):
            return self.algorithm.begun(self.policy, learner, run_seed=self.config.seed)
        return learner

    def _collect_rollouts(self, ref: StageRef, load: Load) -> EpisodeBatch:
        return self.rollouts.collect(
            self._params(load, ref.iteration, ref.step),
            load(StageRef(ref.iteration, "sample_tasks", 0)),
            RolloutPosition(self.config.seed, ref.iteration, ref.step),
        )

    def _process_samples(self, ref: StageRef, load: Load) -> Samples:
        if isinstance(self.algorithm, ActorCriticLearner):
            episodes = load(StageRef(ref.iteration, "collect_rollouts", ref.step))
            return process_with_critic(self.algorithm, self._learner(load, ref.iteration), episodes)
        return process_samples(
            load(StageRef(ref.iteration, "collect_rollouts", ref.step)),
            self.config.baseline.build(),
            self.config.processing,
            seed=seed_for(self.config.seed, "baseline", ref.iteration, ref.step),
            parallel=self.parallel,
        )

    def _adapt(self, ref: StageRef, load: Load) -> TaskParams:
        return adapt(
            self.policy,
            self.algorithm,
            self._learner(load, ref.iteration),
            self._params(load, ref.iteration, ref.step),
            self._step(load, ref.iteration, ref.step),
            parallel=self.parallel,
        )

    def _meta_optimize(self, ref: StageRef, load: Load) -> Update:
        rounds = range(self.algorithm.inner_steps + 1)
        return meta_optimize(
            self.policy,
            self.algorithm,
            self._learner(load, ref.iteration),
            [self._step(load, ref.iteration, k) for k in rounds],
            run_seed=self.config.seed,
            iteration=ref.iteration,
            parallel=self.parallel,
        )

    def _learner(self, load: Load, iteration: int) -> LearnerState:
        return self.begun(load(learner_ref(iteration)).learner)

    def _acting_params(self, iteration: int, k: int) -> StageRef:
        return StageRef(iteration, "adapt", k - 1) if k else learner_ref(iteration)

    def _params(self, load: Load, iteration: int, k: int) -> TaskParams:
        """What the tasks act with in round k: the learner's parameters for all of them, or each task's adapted ones."""
        stored = load(self._acting_params(iteration, k))
        return stored if k else acting_params(self.algorithm, self.begun(stored.learner), self.config.num_tasks)

    def _step_refs(self, iteration: int, k: int) -> list[StageRef]:
        return [StageRef(iteration, "collect_rollouts", k), StageRef(iteration, "process_samples", k)]

    def _step(self, load: Load, iteration: int, k: int) -> Step:
        episodes, samples = (load(ref) for ref in self._step_refs(iteration, k))
        return Step(episodes, samples, k)


def stage_order(config: RunConfig, iteration: int) -> list[StageRef]:
    """The stages of an iteration in the order in which they run."""
    inner_steps = config.algorithm.inner_steps
    refs = [] if iteration else [StageRef(0, "initialize", 0)]
    refs.append(StageRef(iteration, "sample_tasks", 0))
    for k in range(inner_steps + 1):
        refs.append(StageRef(iteration, "collect_rollouts", k))
        refs.append(StageRef(iteration, "process_samples", k))
        if k < inner_steps:
            refs.append(StageRef(iteration, "adapt", k))
    refs.append(StageRef(iteration, "meta_optimize", 0))
    every = config.evaluation.every
    if every is not None and (iteration + 1) % every == 0:
        refs.append(StageRef(iteration, "evaluate", 0))
    return refs


def acting_params(algorithm: Algorithm, learner: LearnerState, num_tasks: int) -> TaskParams:
    """What every task acts with before it adapts: the same parameters, but for particles."""
    if isinstance(algorithm, ActorCriticLearner):
        return algorithm.acting_params(learner, num_tasks)
    return TaskParams.broadcast(learner.params, num_tasks)


def build_policy(config: RunConfig, env: MetaEnv) -> GaussianPolicy | CategoricalPolicy:
    """The policy that fits an environment's actions.

    Raises:
        ConfigError: the algorithm or an option is for actions that are numbers, and these are choices.
    """
    observations, actions = env.observation_space, env.action_space
    observation_size = int(np.prod(observations.shape or ()))
    if not isinstance(actions, Discrete):
        assert actions.shape is not None
        return GaussianPolicy(observation_size, actions.shape[0], config.policy)
    if not config.has_critic:
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name}, which is for actions that are numbers, but those of "
            f"{config.env.name} are {actions}; required a2c, ppo, ppo2 or svpg"
        )
    if options := config.policy.std_options:
        raise ConfigError(
            f"policy: {options} is about a standard deviation, but the actions are {actions}; leave it out"
        )
    return CategoricalPolicy(observation_size, int(actions.n), config.policy)
