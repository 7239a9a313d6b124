"""Task distributions shared by several robots, and fixed training and test sets."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, TaskField
from metaloom.pipeline.envs.task_classes import ONE_WAY_OR_THE_OTHER, QUADRANTS
from metaloom.pipeline.types import Array


def draw_directions(num_tasks: int, rng: np.random.Generator) -> Array:
    """Draw uniformly distributed unit vectors [num_tasks, 2] by normalizing Gaussian vectors, as in ProMP."""
    vectors = rng.standard_normal((num_tasks, 2))
    return vectors / np.hypot(vectors[:, :1], vectors[:, 1:])


def draw_on_disk(num_tasks: int, rng: np.random.Generator, *, radius: float) -> Array:
    """Draw points [num_tasks, 2] uniformly from a disk around the origin."""
    angles, areas = rng.uniform(0, 2 * np.pi, num_tasks), rng.uniform(0, 1, num_tasks)
    return (radius * np.sqrt(areas) * np.stack([np.cos(angles), np.sin(angles)])).T


TASK_SET_SEED = 1337  # seed from which task sets are drawn, so that they are the same in every run


class FixedTasks:
    """Mixin for a fixed set of tasks, drawn when an environment is made. List it before the class that draws tasks."""

    task_set: tuple[tuple[float, ...], ...] | None
    test_task_set: tuple[tuple[float, ...], ...] | None

    def fix_tasks(
        self, num_train_tasks: int, num_test_tasks: int, draw: Callable[[int, np.random.Generator], Array] | None = None
    ) -> tuple[tuple[float, ...], ...]:
        """Set training and test tasks, drawn by `draw` or the next class's `sample_tasks`; return the training tasks.

        Raises EnvError if either set would be empty.
        """
        for name, number in (("num_train_tasks", num_train_tasks), ("num_test_tasks", num_test_tasks)):
            if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise EnvError(f"{name} must be a positive integer, got {number!r}")
        draw = draw or super().sample_tasks  # pyright: ignore[reportAttributeAccessIssue]
        drawn = draw(num_train_tasks + num_test_tasks, np.random.default_rng(TASK_SET_SEED))
        tasks = tuple(tuple(task) for task in drawn.tolist())
        self.task_set, self.test_task_set = tasks[:num_train_tasks], tasks[num_train_tasks:]
        return self.task_set

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """Draw tasks from `task_set` uniformly with replacement, [B, P] float64."""
        assert self.task_set is not None
        return np.array(self.task_set)[rng.integers(len(self.task_set), size=num_tasks)]


class OneWayOrTheOther:
    """Mixin with the tasks of a robot that moves forward or backward. List it before the robot's class.

    | task field | unit | distribution                                 |
    | ---------- | ---- | -------------------------------------------- |
    | direction  | 1    | -1 or +1, each with probability 1/2; id 0, 1 |
    """

    task_set: tuple[tuple[float], tuple[float]] = ((-1.0,), (1.0,))
    task_classes = ONE_WAY_OR_THE_OTHER

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the velocity along the task's direction, [n], given forward [n] or planar [n, 2] velocities."""
        return tasks[:, 0] * (velocity if velocity.ndim == 1 else velocity[:, 0])


class AlongX(OneWayOrTheOther):
    """Mixin with the tasks of a robot that walks forward or backward along x. List it before the robot's class."""

    task_fields: tuple[TaskField] = (TaskField("direction", "1", "+1 to walk along x, -1 to walk against it"),)


class AtSpeed:
    """Mixin with the tasks of a robot that moves forward at a given speed. List it before the robot's class."""

    task_fields: tuple[TaskField] = (TaskField("velocity", "m/s", "forward velocity to hold"),)
    speeds: ClassVar[tuple[float, float]]  # range from which target speeds are drawn, in m/s

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """Draw target speeds uniformly, [B, 1]."""
        return rng.uniform(*self.speeds, (num_tasks, 1))

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the negative absolute difference between forward velocities [n] and the tasks' target speeds, [n]."""
        return -np.abs(velocity - tasks[:, 0])


class AnyDirection:
    """Mixin with the tasks of a robot that walks in any direction. List it before the robot's class.

    | task field               | unit | distribution                      |
    | ------------------------ | ---- | --------------------------------- |
    | direction_x, direction_y | 1    | unit vector, uniform in its angle |
    """

    task_fields: tuple[TaskField, TaskField] = (
        TaskField("direction_x", "1", "unit vector of the way to go, first coordinate"),
        TaskField("direction_y", "1", "unit vector of the way to go, second coordinate"),
    )
    task_classes = QUADRANTS

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """Draw uniformly distributed unit vectors, [B, 2]."""
        return draw_directions(num_tasks, rng)

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the velocity along the task's direction, [n], given planar velocities [n, 2]."""
        return tasks[:, 0] * velocity[:, 0] + tasks[:, 1] * velocity[:, 1]
