"""Sampling of an iteration's tasks."""

from dataclasses import replace

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import ITERATION, At, Stage
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.tasks.samplers import distinct_tasks, draw_tasks
from metaloom.pipeline.types import TaskBatch


def sample_tasks(env: MetaEnv, config: RunConfig, at: At) -> TaskBatch:
    """Draw the tasks of an iteration according to the run's settings."""
    balanced = config.task_sampling == "balanced"
    return draw_tasks(env, num_tasks=config.num_tasks, run_seed=at.run_seed, iteration=at.iteration, balanced=balanced)


def sample_training_tasks(env: MetaEnv, config: RunConfig, at: At) -> TaskBatch:
    """Draw tasks from the training set without replacement."""
    return distinct_tasks(env, config.num_tasks, generator(at.run_seed, "tasks", at.iteration))


SAMPLE_TASKS = Stage(sample_tasks, ITERATION, group="tasks")
SAMPLE_TRAINING_TASKS = replace(SAMPLE_TASKS, run=sample_training_tasks)
