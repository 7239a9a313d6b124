"""The stages of a run that infers its tasks, as PEARL does: rounds of episodes with a belief about the task between.

    fill_memory: every training task, by the prior (once)
         |
    learner --+--> sample_tasks --> collect_rollouts(0) --> ... --> adapt(k-1): belief --> collect_rollouts(k) ...
              |                                                                                    |
              +--> update --> next learner                 sample_transitions: rows, and context <-+
                     ^----------------------------------------------|          every n iterations:  evaluate

What a task is inferred from is what was collected of it last; what is learned from, all that was ever collected.
"""

from collections.abc import Callable
from functools import cached_property
from typing import cast

import numpy as np

from metaloom.flows.graph.iteration_stages import Load, StageOutput, evaluation_refs
from metaloom.flows.graph.off_policy import BEFORE_ITERATIONS, FILL_MEMORY, INITIALIZE, OffPolicyStages
from metaloom.pipeline.algorithms.pearl.rounds import Round
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.tasks.samplers import TaskPool, distinct_tasks, fixed_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, LearnerState, Minibatches, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.evaluate import Tested, evaluate, unseen
from metaloom.stages.infer_task import by_inference, infer_tasks
from metaloom.stages.sample_transitions import sample_transitions
from metaloom.storage import StageRef


class TaskInferenceStages(OffPolicyStages):
    """The stages of a run whose policy acts by a belief about the task."""

    @staticmethod
    def build_policy(config: RunConfig, env: MetaEnv) -> OffPolicyPolicy:
        """Sizes of what the networks take in and give; see IterationStages.

        Raises:
            ConfigError: there are fewer training tasks than are asked for at once.
            EnvError: the environment has no fixed set of them, or no sparse rewards where they are asked for.
        """
        settings = cast(PEARL, config.algorithm)
        num_train_tasks = len(fixed_tasks(env))
        for name, asked in (("num_tasks", config.num_tasks), ("algorithm.meta_batch_size", settings.meta_batch_size)):
            if asked > num_train_tasks:
                raise ConfigError(
                    f"{name} is {asked} but {config.env.name} has {num_train_tasks} training tasks, none of which is "
                    "taken twice at once; use at most that many"
                )
        if settings.sparse_rewards:
            env.sparse_rewards(np.zeros(0, np.float32))
        return OffPolicyStages.build_policy(config, env)

    @staticmethod
    def stage_order(config: RunConfig, iteration: int) -> list[StageRef]:
        """The stages of an iteration in the order in which they run."""
        refs = [] if iteration else [INITIALIZE, FILL_MEMORY]
        refs.append(StageRef(iteration, "sample_tasks"))
        for k, collection in enumerate(cast(PEARL, config.algorithm).rounds(config.max_episode_steps)):
            if collection.from_posterior:
                refs.append(StageRef(iteration, "adapt", k - 1))
            refs.append(StageRef(iteration, "collect_rollouts", k))
        refs += [StageRef(iteration, "sample_transitions"), StageRef(iteration, "update")]
        return refs + evaluation_refs(config, iteration)

    def inputs(self, ref: StageRef) -> list[StageRef]:
        """The stages whose outputs a stage reads; see OffPolicyStages."""
        if ref.stage == "adapt":
            return [self.learner_ref(ref.iteration), *self._context_refs(ref)]
        inputs = super().inputs(ref)
        if ref.stage == "collect_rollouts" and self._rounds[ref.step].from_posterior:
            return [StageRef(ref.iteration, "adapt", ref.step - 1), *inputs]
        return inputs

    def compute(self, ref: StageRef, load: Load) -> StageOutput:
        """A stage's output, from the inputs that `load` brings."""
        if ref.stage != "adapt":
            return super().compute(ref, load)
        return infer_tasks(
            self.algorithm,
            load(self.learner_ref(ref.iteration)).learner,
            [load(context) for context in self._context_refs(ref)],
            num_transitions=self._pearl.embedding_batch_size,
            context_rewards=self.context_rewards,
            position=(self.config.seed, ref.iteration, ref.step),
        )

    def fill_memory(self, learner: LearnerState) -> EpisodeBatch:
        """Episodes of every training task, by the prior."""
        tasks = self._train_tasks
        rollouts = self.rollouts.sampling(
            self._pearl.initial_episodes(self.config.max_episode_steps), deterministic=False
        )
        return rollouts.collect(
            self.acting_params(learner, len(tasks)), tasks, RolloutPosition(self.config.seed, BEFORE_ITERATIONS, 0)
        )

    def sample_tasks(self, iteration: int) -> TaskBatch:
        """Different tasks of the training set."""
        return distinct_tasks(self.env, self.config.num_tasks, generator(self.config.seed, "tasks", iteration))

    def collect_rollouts(self, ref: StageRef, load: Load) -> EpisodeBatch:
        """A round of episodes, by the prior or by what the last round showed."""
        collection = self._rounds[ref.step]
        learner = load(self.learner_ref(ref.iteration)).learner
        tasks = load(StageRef(ref.iteration, "sample_tasks"))
        params = self.acting_params(learner, len(tasks))
        if collection.from_posterior:
            belief = load(StageRef(ref.iteration, "adapt", ref.step - 1))
            params = TaskParams({**params.params, **belief.params})
        rollouts = self.rollouts.sampling(collection.episodes, deterministic=False)
        return rollouts.collect(params, tasks, self.position(ref))

    def evaluate(self, learner: LearnerState, updates: int, tested: Tested = unseen) -> Evaluation:
        """Returns by the prior, and after inferring each task from 1 ... K rounds of episodes; see IterationStages.

        Episodes that a task is inferred from act deterministically where test episodes do: they explore by drawing what
        the task may be, not by drawing actions.
        """
        plan = EvaluationPlan.of(self.config)
        tasks = evaluation_tasks(self.config, self.env, updates)
        return evaluate(
            self.acting_params(learner, len(tasks)),
            tasks,
            adaptation_steps=plan.adaptation_steps,
            adaptation_rollouts=self.rollouts.sampling(plan.episodes, deterministic=plan.deterministic).collect,
            test_rollouts=self.rollouts.sampling(plan.test_episodes, deterministic=plan.deterministic).collect,
            adapted=by_inference(
                self.algorithm,
                learner,
                first_inference=self._pearl.num_exp_traj_eval,
                context_rewards=self.context_rewards,
            ),
            run_seed=plan.run_seed,
            returns=self._evaluation_returns,
            tested=tested,
        )

    def sample_transitions(self, iteration: int, load: Load) -> Minibatches:
        """Rows for the gradient steps of an iteration, and the context of each of their tasks."""
        settings = self._pearl
        return sample_transitions(
            self.memory.view(iteration, load),
            num_updates=settings.num_updates,
            num_places=settings.num_updates,
            task_ids=range(len(self._train_tasks)),
            num_tasks=settings.meta_batch_size,
            batch_size=settings.batch_size,
            context_size=settings.embedding_batch_size,
            memory_size=settings.memory_size,
            run_seed=self.config.seed,
            iteration=iteration,
        )

    def collected(self, iteration: int, load: Load) -> dict[int, list[EpisodeBatch]]:
        """The episodes of an iteration, by whether their actors had inferred the task."""
        by: dict[int, list[EpisodeBatch]] = {}
        for ref, collection in zip(self.round_refs(iteration), self._rounds, strict=True):
            by.setdefault(int(collection.from_posterior), []).append(load(ref))
        return by

    def round_refs(self, iteration: int) -> list[StageRef]:
        """The rounds of an iteration."""
        return [StageRef(iteration, "collect_rollouts", k) for k in range(len(self._rounds))]

    def in_context(self, ref: StageRef) -> bool:
        """Whether tasks are inferred from a round."""
        return ref.stage == "fill_memory" or self._rounds[ref.step].in_context

    @property
    def context_rewards(self) -> Callable[[Array], Array] | None:
        """What a context shows instead of the rewards that are learned from."""
        return self.env.sparse_rewards if self._pearl.sparse_rewards else None

    @property
    def _pearl(self) -> PEARL:
        return cast(PEARL, self.config.algorithm)

    def _most_rows(self) -> int:
        """Transitions that can ever be drawn from; see OffPolicyStages."""
        config, tasks = self.config, len(self._train_tasks)
        per_iteration = sum(collection.episodes for collection in self._rounds) * config.num_tasks
        episodes = tasks * self._pearl.initial_episodes(config.max_episode_steps) + config.iterations * per_iteration
        return min(self._pearl.memory_size * tasks, episodes * config.max_episode_steps)

    @cached_property
    def _rounds(self) -> tuple[Round, ...]:
        return self._pearl.rounds(self.config.max_episode_steps)

    @cached_property
    def _train_tasks(self) -> TaskBatch:
        return TaskPool.of(self.env, fixed_tasks(self.env)).all()

    def _context_refs(self, ref: StageRef) -> list[StageRef]:
        """The rounds up to an inner step that tasks are inferred from."""
        rounds = self.round_refs(ref.iteration)[: ref.step + 1]
        return [collected for collected in rounds if self.in_context(collected)]

    def _evaluation_returns(self, episodes: EpisodeBatch) -> Array:
        if self.context_rewards is None:
            return episodes.episode_returns
        return (self.context_rewards(episodes.rewards) * episodes.mask).sum(axis=2, dtype=np.float64)
