"""Sampling of an iteration's tasks."""

from dataclasses import replace
from functools import partial

import numpy as np

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import ITERATION, At, Stage
from metaloom.pipeline.envs.answers import is_ctrl_c, last_line, own_traceback
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.tasks.samplers import balanced_draw, distinct_tasks, require_classes
from metaloom.pipeline.types import Array, TaskBatch


def sample_tasks(env: MetaEnv, config: RunConfig, at: At) -> TaskBatch:
    """Draw the tasks of an iteration according to the run's settings."""
    balanced = config.task_sampling == "balanced"
    return draw_tasks(env, num_tasks=config.num_tasks, run_seed=at.run_seed, iteration=at.iteration, balanced=balanced)


def sample_training_tasks(env: MetaEnv, config: RunConfig, at: At) -> TaskBatch:
    """Draw tasks from the training set without replacement."""
    return distinct_tasks(env, config.num_tasks, generator(at.run_seed, "tasks", at.iteration))


SAMPLE_TASKS = Stage(sample_tasks, ITERATION, group="tasks")
SAMPLE_TRAINING_TASKS = replace(SAMPLE_TASKS, run=sample_training_tasks)


def draw_tasks(env: MetaEnv, *, num_tasks: int, run_seed: int, iteration: int, balanced: bool = False) -> TaskBatch:
    """Draw the meta-batch of an iteration: `num_tasks` independent draws from the env's task distribution.

    With `balanced`, every class is drawn the same number of times, by rejection. Raises EnvError if the env's
    `sample_tasks` fails or does not return finite values [B, P]; or, if balanced, if it declares no classes or one is
    almost never drawn.
    """
    rng = generator(run_seed, "tasks", iteration)
    if balanced:
        classes, source = require_classes(env, "task_sampling"), type(env.unwrapped).__name__
        draw = partial(_draw, env, rng=rng, iteration=iteration)
        params = balanced_draw(classes, env.task_fields, num_tasks, rng, draw, source)
    else:
        params = _draw(env, num_tasks, rng=rng, iteration=iteration)
    places = {task: index for index, task in enumerate(env.task_set or ())}  # None: tasks are not limited to a set
    ids = np.array([places.get(tuple(task), -1) for task in params.tolist()], np.int64)
    fields = env.task_fields
    return TaskBatch(params, ids, tuple(f.name for f in fields), tuple(f.unit for f in fields))


def _draw(env: MetaEnv, num_tasks: int, *, rng: np.random.Generator, iteration: int) -> Array:
    try:
        params = np.asarray(env.sample_tasks(num_tasks, rng), np.float64)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise EnvError(
            f"iteration {iteration}: {type(env.unwrapped).__name__}.sample_tasks raised {last_line(error)}\n"
            f"Its own traceback:\n{own_traceback(error).rstrip()}"
        ) from error
    names = tuple(field.name for field in env.task_fields)
    if params.shape != (num_tasks, len(names)) or not np.isfinite(params).all():
        raise EnvError(
            f"{type(env.unwrapped).__name__}.sample_tasks returned shape {params.shape}; "
            f"expected {(num_tasks, len(names))} finite numbers: one row per task, columns {names}"
        )
    return params
