"""Fixed sets of tasks to train on and to test with, as PEARL's experiments use them."""

from collections.abc import Callable

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.types import Array

TaskSet = tuple[tuple[float, ...], ...]

TASK_SET_SEED = 1337
"""Of the sets' own generator: they are the same in every run, whatever its seed."""


def fixed_task_sets(
    draw: Callable[[int, np.random.Generator], Array], *, num_train: int, num_test: int
) -> tuple[TaskSet, TaskSet]:
    """Tasks to train on and others to test with, from `draw(num_tasks, rng)`; the same in every process.

    Raises:
        EnvError: one of the sets would be empty.
    """
    for name, number in (("num_train_tasks", num_train), ("num_test_tasks", num_test)):
        if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise EnvError(f"{name} is {number!r}; required a whole number of at least 1")
    tasks = [tuple(task) for task in draw(num_train + num_test, np.random.default_rng(TASK_SET_SEED)).tolist()]
    return tuple(tasks[:num_train]), tuple(tasks[num_train:])


def choose_tasks(env: MetaEnv, num_tasks: int, rng: np.random.Generator) -> Array:
    """[B, P] float64, B tasks of the env's `task_set`, each equally likely, with replacement."""
    assert env.task_set is not None
    return np.array(env.task_set)[rng.integers(len(env.task_set), size=num_tasks)]
