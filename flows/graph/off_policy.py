"""The stages of an off-policy run: the store is the replay memory.

    fill_memory (once)
         |
    learner --+--> sample_tasks --> collect_rollouts --> sample_transitions (row numbers over all that is stored)
              |                                                  |
              +------------------------------------------> update --> next learner       every n iterations:  evaluate

DQL and SAC proceed so; PEARL, which infers its task while it collects, in `flows/graph/task_inference.py`.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Self, cast

from gymnasium.spaces import Discrete

from metaloom.flows.graph.iteration_stages import IterationStages, Load, StageOutput, evaluation_refs, observation_size
from metaloom.flows.graph.run_memory import CollectedRound, RunMemory
from metaloom.flows.rollouts.workers import RolloutWorkers
from metaloom.pipeline.algorithms.off_policy.settings import OffPolicy
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Minibatches, TaskBatch, TaskParams, Update
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.sample_tasks import sample_tasks
from metaloom.stages.sample_transitions import sample_transitions
from metaloom.stages.update import update
from metaloom.storage import Run, StageRef

MIB = 2**20

BEFORE_ITERATIONS = -1
"""What stands for the iteration in the positions of the episodes that fill the memory."""

INITIALIZE, FILL_MEMORY = StageRef(0, "initialize"), StageRef(0, "fill_memory")


class OffPolicyStages(IterationStages):
    """The stages of a run whose updates learn from transitions of all iterations so far."""

    last_stage: ClassVar[str] = "update"

    @classmethod
    def build(
        cls,
        config: RunConfig,
        rollouts: RolloutWorkers,
        parallel: Callable[..., Iterator[Any]],
        run: Run | None = None,
    ) -> Self:
        """The stages of a run with this configuration; see IterationStages."""
        # Which actions there are is told before a scale of them is asked for, which choices do not have.
        cls.build_policy(config, make_env(config.env.model_copy(update={"action_scale": None})))
        return super().build(config, rollouts, parallel, run)

    @staticmethod
    def build_policy(config: RunConfig, env: MetaEnv) -> OffPolicyPolicy:
        """Sizes of what the algorithm's networks take in and give; see IterationStages."""
        actions, name = env.action_space, config.algorithm.name
        chooses = isinstance(actions, Discrete)
        if chooses != (getattr(config.algorithm, "actor", "") == "q_values"):
            kind, others = ("choices", "sac or pearl") if name == "dql" else ("numbers", "dql, a2c, ppo, ppo2 or svpg")
            raise ConfigError(
                f"algorithm.name is {name}, which is for actions that are {kind}, but those of {config.env.name} are "
                f"{actions}; required {others}"
            )
        size, choices = (0, int(actions.n)) if isinstance(actions, Discrete) else ((actions.shape or (0,))[0], 0)
        return OffPolicyPolicy(observation_size(env), size, choices, config.policy)

    @staticmethod
    def stage_order(config: RunConfig, iteration: int) -> list[StageRef]:
        """The stages of an iteration in the order in which they run."""
        before = [] if iteration else [INITIALIZE, FILL_MEMORY]
        names = ("sample_tasks", "collect_rollouts", "sample_transitions", "update")
        return [*before, *(StageRef(iteration, name) for name in names), *evaluation_refs(config, iteration)]

    def inputs(self, ref: StageRef) -> list[StageRef]:
        """The stages whose outputs a stage reads.

        Row numbers are over all iterations so far. Their record names the rounds of its own iteration and the row
        numbers before it, so the lineage of every row is there without a list that grows with the run.
        """
        i = ref.iteration
        match ref.stage:
            case "initialize" | "sample_tasks":
                return []
            case "fill_memory":
                return [INITIALIZE]
            case "collect_rollouts":
                return [self.learner_ref(i), StageRef(i, "sample_tasks")]
            case "sample_transitions":
                before = StageRef(i - 1, "sample_transitions") if i else FILL_MEMORY
                return [before, StageRef(i, "sample_tasks"), *self.round_refs(i)]
            case "update":
                fill = [] if i else [FILL_MEMORY]
                return [self.learner_ref(i), *fill, *self.round_refs(i), StageRef(i, "sample_transitions")]
            case "evaluate":
                return [StageRef(i, "update")]
            case _:
                raise ValueError(f"no stage is called {ref.stage!r}")

    def compute(self, ref: StageRef, load: Load) -> StageOutput:
        """A stage's output, from the inputs that `load` brings."""
        i = ref.iteration
        match ref.stage:
            case "initialize":
                return self.initialize()
            case "fill_memory":
                return self.fill_memory(load(INITIALIZE).learner)
            case "sample_tasks":
                return self.sample_tasks(i)
            case "collect_rollouts":
                return self.collect_rollouts(ref, load)
            case "sample_transitions":
                return self.sample_transitions(i, load)
            case "update":
                return self._update(i, load)
            case "evaluate":
                return self.evaluate(load(StageRef(i, "update")).learner, i + 1)
            case _:
                raise ValueError(f"no stage is called {ref.stage!r}")

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What every task acts with; see IterationStages."""
        return self.algorithm.acting_params(learner, num_tasks)

    def fill_memory(self, learner: LearnerState) -> EpisodeBatch:
        """Episodes to begin with: by actions drawn uniformly, or by a policy that was trained before."""
        settings = self._settings
        tasks = self.sample_tasks(0)
        if settings.use_trained_policy_for_refill:
            actor, params = settings.actor, self.algorithm.refill_params(learner, len(tasks))
        else:
            actor, params = "uniform", TaskParams({})
        rollouts = self.rollouts.filling(settings.init_memory_steps, actor=actor)
        return rollouts.collect(params, tasks, RolloutPosition(self.config.seed, BEFORE_ITERATIONS, 0))

    def sample_tasks(self, iteration: int) -> TaskBatch:
        """The task of an iteration."""
        return sample_tasks(self.env, num_tasks=self.config.num_tasks, run_seed=self.config.seed, iteration=iteration)

    def collect_rollouts(self, ref: StageRef, load: Load) -> EpisodeBatch:
        """The episodes of a round."""
        learner = load(self.learner_ref(ref.iteration)).learner
        tasks = load(StageRef(ref.iteration, "sample_tasks"))
        return self.rollouts.collect(self.acting_params(learner, len(tasks)), tasks, self.position(ref))

    def sample_transitions(self, iteration: int, load: Load) -> Minibatches:
        """Rows for the gradient steps of an iteration."""
        settings = self._settings
        steps = self.config.episodes_per_task * self.config.max_episode_steps
        collected = sum(load(ref).num_steps for ref in self.round_refs(iteration))
        return sample_transitions(
            self.memory.view(iteration, load),
            num_updates=settings.gradient_steps(collected),
            num_places=settings.gradient_steps(steps),
            task_ids=[0],
            num_tasks=1,
            batch_size=settings.batch_size,
            context_size=0,
            memory_size=settings.memory_size,
            run_seed=self.config.seed,
            iteration=iteration,
        )

    def collected(self, iteration: int, load: Load) -> dict[int, list[EpisodeBatch]]:
        """The episodes of an iteration, by how often their actors had inferred the task: never."""
        return {0: [load(ref) for ref in self.round_refs(iteration)]}

    def round_refs(self, iteration: int) -> list[StageRef]:
        """The rounds of an iteration."""
        return [StageRef(iteration, "collect_rollouts")]

    def in_context(self, ref: StageRef) -> bool:
        """Whether tasks are inferred from a round."""
        del ref
        return False

    @property
    def context_rewards(self) -> Callable[[Array], Array] | None:
        """What a context shows instead of the rewards that are learned from."""
        return None

    @cached_property
    def memory(self) -> RunMemory:
        """The replay memory. What it has read is kept as long as these stages are."""
        return RunMemory(
            TransitionColumns(self.policy.observation_size, self.policy.action_size),
            self._memory_rounds,
            run=self.run,
            by_task=self.config.infers_tasks,
            cache_bytes=self.config.replay.cache_mib * MIB,
            max_rows=self._most_rows(),
            context_rewards=self.context_rewards,
        )

    @property
    def _settings(self) -> OffPolicy:
        return cast(OffPolicy, self.config.algorithm)

    def _most_rows(self) -> int:
        """Transitions that can ever be drawn from: no more than are remembered, and than the run makes."""
        config, settings = self.config, self._settings
        # The last episodes that fill the memory are side by side, and may bring as many steps again as were asked for.
        filled = 2 * settings.init_memory_steps + config.max_episode_steps
        collected = config.iterations * config.episodes_per_task * config.max_episode_steps
        return min(settings.memory_size, filled + collected)

    def position(self, ref: StageRef) -> RolloutPosition:
        """Where the episodes of a round draw."""
        return RolloutPosition(self.config.seed, ref.iteration, ref.step)

    def _memory_rounds(self, iteration: int) -> list[CollectedRound]:
        refs = [*([] if iteration else [FILL_MEMORY]), *self.round_refs(iteration)]
        return [CollectedRound(ref, self.in_context(ref)) for ref in refs]

    def _update(self, iteration: int, load: Load) -> Update:
        return update(
            self.policy,
            self.algorithm,
            load(self.learner_ref(iteration)).learner,
            self.memory.minibatches(iteration, load(StageRef(iteration, "sample_transitions")), load),
            self.collected(iteration, load),
            fill=[] if iteration else [load(FILL_MEMORY)],
            run_seed=self.config.seed,
            iteration=iteration,
            parallel=self.parallel,
        )
