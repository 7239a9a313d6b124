"""The goals of Meta-World's benchmarks: those that the package draws from a benchmark's seed."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Sequence
from functools import cache
from typing import Any

import mujoco
import numpy as np

from metaloom.pipeline.envs.metaworld.names import CLASSES
from metaloom.pipeline.envs.metaworld.package import official_classes
from metaloom.pipeline.types import Array

GOALS_PER_CLASS = 50
GOAL_SIZE = 6
"""Numbers that a task keeps of a goal; classes with only three leave the others 0."""

Tasks = tuple[tuple[float, ...], ...]


@cache
def benchmark_tasks(names: Sequence[str], seed: int) -> Tasks:
    """All tasks of a benchmark's classes: the number of the class, and the goal.

    They are those of the package's `_make_tasks(classes, ..., seed)`. It draws them from numpy's global generator while
    it simulates resets; here the generator is one of its own, and nothing is simulated, since no draw depends on it.

    Args:
        names: of the classes, in the benchmark's order.
        seed: of the benchmark.

    Returns:
        GOALS_PER_CLASS of each class, 1 + GOAL_SIZE numbers each.
    """
    generator = np.random.RandomState(seed)
    return tuple(task for name in names for task in _class_tasks(name, generator))


def _class_tasks(name: str, generator: Any) -> Tasks:
    env = official_classes()[name]()
    env._set_task_called = True
    env._get_state_rand_vec = lambda: _draw(env, generator)
    env.do_simulation = lambda ctrl, n_frames: mujoco.mj_forward(env.model, env.data)
    reset_hand = env._reset_hand
    env._reset_hand = lambda: reset_hand(steps=1)
    tasks: list[tuple[float, ...]] = []
    for _ in range(GOALS_PER_CLASS):
        env.reset()
        tasks.append((float(CLASSES.index(name)), *padded(env._last_rand_vec).tolist()))
    env.close()
    return tuple(tasks)


def _draw(env: Any, generator: Any) -> Array:
    """As SawyerXYZEnv._get_state_rand_vec, from a generator of its own."""
    space = env._random_reset_space
    env._last_rand_vec = generator.uniform(space.low, space.high, size=space.low.size)
    return env._last_rand_vec


def padded(goal: Array) -> Array:
    """[GOAL_SIZE] float64."""
    return np.concatenate([goal, np.zeros(GOAL_SIZE - len(goal))])
