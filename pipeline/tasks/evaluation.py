"""Evaluation plans: numbers of episodes, seeds and tasks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.tasks.samplers import TaskDistribution, TaskPool, draw_tasks, require_classes
from metaloom.pipeline.types import Array, TaskBatch

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig


@dataclass(frozen=True)
class EvaluationPlan:
    """Sizes and seed of an evaluation."""

    adaptation_steps: int  # K
    episodes: int  # N, per task and adaptation step
    test_episodes: int  # M, per task after each of 0 ... K steps
    deterministic: bool  # take the most likely action in test episodes
    run_seed: int  # replaces the run's seed in the evaluation, so that no draw is shared with training

    @classmethod
    def of(cls, config: "RunConfig") -> "EvaluationPlan":
        """Return the evaluation plan that a run's configuration describes."""
        asked, algorithm = config.evaluation, config.algorithm
        steps = algorithm.evaluation_steps if asked.adaptation_steps is None else asked.adaptation_steps
        # A policy with memory processes one episode after the other.
        episodes = asked.episodes or (config.episodes_per_task if algorithm.trial is None else 1)
        # Halved because run seeds are below 2**63.
        run_seed = seed_for(config.seed, "evaluation", asked.seed) // 2
        return cls(steps, episodes, asked.test_episodes or config.episodes_per_task, asked.deterministic, run_seed)


def evaluation_tasks(config: "RunConfig", env: MetaEnv, updates: int) -> TaskBatch:
    """Return the tasks on which to evaluate the learner after `updates` updates.

    The tasks depend on `updates` only if there is no fixed training set: held-out draws then exclude tasks already seen
    in training, and tasks=train selects the tasks of the last iteration. Raises EnvError if the tasks are invalid or
    cannot be drawn.
    """
    asked, source = config.evaluation, _source(config, env, updates)
    rng = generator(EvaluationPlan.of(config).run_seed, "tasks", 0)
    balanced_by = require_classes(env, "evaluation.task_sampling") if asked.task_sampling == "balanced" else None
    if isinstance(source, TaskDistribution):
        if asked.evenly_by is not None:
            raise EnvError(
                f"evaluation.evenly_by is {asked.evenly_by} but the tasks are drawn from a distribution; it needs a "
                "finite set of tasks, such as a list"
            )
        return source.sample(asked.num_tasks or config.num_tasks, rng, balanced_by)
    if balanced_by is not None:
        return source.sample_balanced(asked.num_tasks or config.num_tasks, rng, balanced_by)
    if asked.evenly_by is not None:
        return source.sample_evenly(asked.num_tasks, rng, asked.evenly_by)
    from_training = asked.tasks == "train" or (asked.tasks == "held-out" and env.test_task_set is None)
    if asked.num_tasks is None and (env.task_set is None or not from_training):
        return source.all()
    return source.sample(asked.num_tasks or config.num_tasks, rng)


def tasks_drawn_from(config: "RunConfig", env: MetaEnv, updates: int) -> int | None:
    """Return the size of the set from which evaluation tasks are drawn, or None for a distribution."""
    source = _source(config, env, updates)
    return None if isinstance(source, TaskDistribution) else len(source.tasks)


def tasks_are_new(config: "RunConfig", env: MetaEnv) -> bool:
    """Return True if, according to the environment and settings, no evaluation task occurs in training."""
    if config.evaluation.tasks != "held-out":
        return False
    if env.test_task_set is None:
        return env.task_set is None
    return not {*env.test_task_set} & {*(env.task_set or ())}


def _source(config: "RunConfig", env: MetaEnv, updates: int) -> TaskPool | TaskDistribution:
    asked = config.evaluation.tasks
    if not isinstance(asked, str):
        pool = TaskPool.of(env, asked)
        # The environment may reject user-defined tasks. Fail here rather than on a worker.
        for task in pool.all().params:
            env.set_task(task)
        return pool
    if asked == "held-out" and env.test_task_set is not None:
        return TaskPool.of(env, env.test_task_set)
    if env.task_set is not None:
        # With a fixed training set and no held-out tasks, evaluate on training tasks.
        return TaskPool.of(env, env.task_set)
    if asked == "train":
        return TaskPool(env.task_fields, _training_draw(config, env, max(updates - 1, 0)))
    draws = [_training_draw(config, env, i) for i in range(updates)]
    return TaskDistribution(env, np.concatenate(draws or [np.zeros((0, len(env.task_fields)))]))


def _training_draw(config: "RunConfig", env: MetaEnv, iteration: int) -> Array:
    """Draw an iteration's training tasks again, as the stage `sample_tasks` did."""
    B, balanced = config.num_tasks, config.task_sampling == "balanced"
    return draw_tasks(env, num_tasks=B, run_seed=config.seed, iteration=iteration, balanced=balanced).params
