"""The stages of an on-policy meta-training run: their order, what each reads, and how each is computed.

    learner --+--> sample_tasks --> collect_rollouts(0) --> process_samples(0) --> adapt(0) --> collect_rollouts(1) ...
              |                                                                                        |
              +------------------ meta_optimize(all steps) <------------------ process_samples(K) <----+--> next learner
                                                                                  every n iterations:  evaluate

No gradient crosses a stage: `meta_optimize` computes the adaptation again from what is stored.
"""

from typing import ClassVar

from gymnasium.spaces import Discrete

from metaloom.flows.graph.iteration_stages import IterationStages, Load, StageOutput, evaluation_refs, observation_size
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, Step, TaskParams, Update
from metaloom.stages.adapt import adapt
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.meta_optimize import meta_optimize
from metaloom.stages.process_samples import process_samples
from metaloom.stages.sample_tasks import sample_tasks
from metaloom.storage import StageRef


class OnPolicyStages(IterationStages):
    """The stages of a run whose updates learn from the episodes of their own iteration alone."""

    last_stage: ClassVar[str] = "meta_optimize"

    @staticmethod
    def build_policy(config: RunConfig, env: MetaEnv) -> GaussianPolicy | CategoricalPolicy:
        """A Gaussian policy for numbers, a categorical one for choices; see IterationStages."""
        actions = env.action_space
        if not isinstance(actions, Discrete):
            assert actions.shape is not None
            return GaussianPolicy(observation_size(env), actions.shape[0], config.policy)
        if not config.has_critic:
            raise ConfigError(
                f"algorithm.name is {config.algorithm.name}, which is for actions that are numbers, but those of "
                f"{config.env.name} are {actions}; required a2c, ppo, ppo2, svpg or dql"
            )
        if options := config.policy.std_options:
            raise ConfigError(
                f"policy: {options} is about a standard deviation, but the actions are {actions}; leave it out"
            )
        return CategoricalPolicy(observation_size(env), int(actions.n), config.policy)

    @staticmethod
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
        return refs + evaluation_refs(config, iteration)

    def inputs(self, ref: StageRef) -> list[StageRef]:
        """The stages whose outputs a stage reads."""
        i, k = ref.iteration, ref.step
        match ref.stage:
            case "initialize" | "sample_tasks":
                return []
            case "collect_rollouts":
                return [self._acting_params(i, k), StageRef(i, "sample_tasks", 0)]
            case "process_samples":
                critic = [self.learner_ref(i)] if self.config.has_critic else []
                return [*critic, StageRef(i, "collect_rollouts", k)]
            case "adapt":
                before = [] if k == 0 else [StageRef(i, "adapt", k - 1)]
                return [self.learner_ref(i), *before, *self._step_refs(i, k)]
            case "meta_optimize":
                rounds = range(self.config.algorithm.inner_steps + 1)
                return [self.learner_ref(i), *(ref for k in rounds for ref in self._step_refs(i, k))]
            case "evaluate":
                return [StageRef(i, "meta_optimize", 0)]
            case _:
                raise ValueError(f"no stage is called {ref.stage!r}")

    def compute(self, ref: StageRef, load: Load) -> StageOutput:
        """A stage's output, from the inputs that `load` brings."""
        match ref.stage:
            case "initialize":
                return self.initialize()
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

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """The same parameters for all tasks, but for particles; see IterationStages."""
        return self.algorithm.acting_params(learner, num_tasks)

    def begun(self, learner: LearnerState) -> LearnerState:
        """A stored learner as the iteration behind it acts and learns with it."""
        return self.algorithm.at_start(learner, run_seed=self.config.seed)

    def _collect_rollouts(self, ref: StageRef, load: Load) -> EpisodeBatch:
        return self.rollouts.collect(
            self._params(load, ref.iteration, ref.step),
            load(StageRef(ref.iteration, "sample_tasks", 0)),
            RolloutPosition(self.config.seed, ref.iteration, ref.step),
        )

    def _process_samples(self, ref: StageRef, load: Load) -> Samples:
        if self.config.has_critic:
            episodes = load(StageRef(ref.iteration, "collect_rollouts", ref.step))
            return self.algorithm.process(self._learner(load, ref.iteration), episodes, seed=0)
        return process_samples(
            load(StageRef(ref.iteration, "collect_rollouts", ref.step)),
            self.config.baseline.build(),
            self.config.processing,
            seed=seed_for(self.config.seed, "baseline", ref.iteration, ref.step),
            parallel=self.parallel,
        )

    def _adapt(self, ref: StageRef, load: Load) -> TaskParams:
        return adapt(
            self.algorithm,
            self._learner(load, ref.iteration),
            self._params(load, ref.iteration, ref.step),
            self._step(load, ref.iteration, ref.step),
            parallel=self.parallel,
        )

    def _meta_optimize(self, ref: StageRef, load: Load) -> Update:
        rounds = range(self.config.algorithm.inner_steps + 1)
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
        return self.begun(load(self.learner_ref(iteration)).learner)

    def _acting_params(self, iteration: int, k: int) -> StageRef:
        return StageRef(iteration, "adapt", k - 1) if k else self.learner_ref(iteration)

    def _params(self, load: Load, iteration: int, k: int) -> TaskParams:
        """What the tasks act with in round k: the learner's parameters for all of them, or each task's adapted ones."""
        stored = load(self._acting_params(iteration, k))
        return stored if k else self.acting_params(self.begun(stored.learner), self.config.num_tasks)

    def _step_refs(self, iteration: int, k: int) -> list[StageRef]:
        return [StageRef(iteration, "collect_rollouts", k), StageRef(iteration, "process_samples", k)]

    def _step(self, load: Load, iteration: int, k: int) -> Step:
        episodes, samples = (load(ref) for ref in self._step_refs(iteration, k))
        return Step(episodes, samples, k)
