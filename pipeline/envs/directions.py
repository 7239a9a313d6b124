"""Directions as tasks of robots that walk in the plane."""

import numpy as np

from metaloom.pipeline.envs.contract import TaskField
from metaloom.pipeline.envs.task_classes import ONE_WAY_OR_THE_OTHER, QUADRANTS
from metaloom.pipeline.envs.task_draws import draw_directions, draw_signs
from metaloom.pipeline.types import Array


class AlongX:
    """Tasks of a robot that is to walk one way or the other along x. Goes before the robot's class."""

    task_fields = (TaskField("direction", "1", "+1 to walk along x, -1 to walk against it"),)
    task_set = ((-1.0,), (1.0,))
    task_classes = ONE_WAY_OR_THE_OTHER

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """[B, 1], both ways equally likely."""
        return draw_signs(num_tasks, rng)

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """[n], the velocity [n, 2] along the direction of the task."""
        return tasks[:, 0] * velocity[:, 0]


class AnyDirection:
    """Tasks of a robot that is to walk in some direction. Goes before the robot's class."""

    task_fields = (
        TaskField("direction_x", "1", "unit vector of the way to go, first coordinate"),
        TaskField("direction_y", "1", "unit vector of the way to go, second coordinate"),
    )
    task_classes = QUADRANTS

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """[B, 2], all directions equally likely."""
        return draw_directions(num_tasks, rng)

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """[n], the velocity [n, 2] along the direction of the task."""
        return tasks[:, 0] * velocity[:, 0] + tasks[:, 1] * velocity[:, 1]
