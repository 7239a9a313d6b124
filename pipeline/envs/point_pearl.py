"""PEARL's point robots, with fixed training and test goals."""

from typing import Literal

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.point import GOAL, PointRobot, norm
from metaloom.pipeline.envs.task_sets import FixedTasks
from metaloom.pipeline.types import Array

NUM_TRAIN_TASKS, NUM_TEST_TASKS = 80, 20


class PearlPointRobot(FixedTasks, PointRobot, MetaEnv):
    """Go to one of 80 goals that the observation does not show (PEARL's point-robot).

    | task field     | unit | distribution                                                                     |
    | -------------- | ---- | -------------------------------------------------------------------------------- |
    | goal_x, goal_y | m    | uniform over 80 fixed draws from U(-1, 1)² (ids 0-79); 20 others for testing     |

    Observation and action: see PointRobot. Options: `num_train_tasks` and `num_test_tasks`. Start: U(-1, 1)². Reward
    term: distance = -‖s' - goal‖, m. Never terminates; PEARL's episodes have 20 steps. Differs from the original: the
    robot also clips actions, and goals come from a separate generator instead of NumPy's global one.
    """

    task_fields: tuple[TaskField, ...] = GOAL
    reach: float = 1.5
    max_action: float = 0.1

    def __init__(self, *, num_train_tasks: int = NUM_TRAIN_TASKS, num_test_tasks: int = NUM_TEST_TASKS) -> None:
        super().__init__()
        self.fix_tasks(num_train_tasks, num_test_tasks, self.draw_goals)

    @staticmethod
    def draw_goals(num_tasks: int, rng: np.random.Generator) -> Array:
        return rng.uniform(-1, 1, (num_tasks, 2))

    def start(self, rng: np.random.Generator) -> Array:
        return rng.uniform(-1, 1, 2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        return {"distance": -norm(next_states - tasks)}


class PearlSparsePointRobot(FixedTasks, PointRobot, MetaEnv):
    """Go from the origin to one of 80 goals on a semicircle (PEARL's sparse-point-robot).

    | task field     | unit | distribution                                                                     |
    | -------------- | ---- | -------------------------------------------------------------------------------- |
    | goal_x, goal_y | m    | uniform over 80 of 100 points evenly spaced on the upper half of the unit circle |
    |                |      | (ids 0-79); the other 20 for testing                                             |

    | option `reward` | term      | value, with d the distance from s' to the goal, m |
    | --------------- | --------- | ------------------------------------------------- |
    | dense (default) | distance  | -d                                                |
    | sparse          | nearness  | 1 - d where d <= 0.2 m, else 0                    |

    Observation and action: see PointRobot. Options: `num_train_tasks` and `num_test_tasks`.

    PEARL learns from the dense reward but infers tasks and evaluates with the sparse reward, which `sparse_rewards`
    computes from the dense one. With the same seed and actions, both variants produce the same trajectories. Start: the
    origin. Never terminates; PEARL's episodes have 20 steps.
    """

    task_fields: tuple[TaskField, ...] = GOAL
    reach: float = 1.5
    max_action: float = 0.1
    goal_radius: float = 0.2

    def __init__(
        self,
        reward: Literal["dense", "sparse"] = "dense",
        *,
        num_train_tasks: int = NUM_TRAIN_TASKS,
        num_test_tasks: int = NUM_TEST_TASKS,
    ) -> None:
        super().__init__()
        self.fix_tasks(num_train_tasks, num_test_tasks, self.draw_goals)
        if reward not in ("dense", "sparse"):
            raise EnvError(f"{type(self).__name__}: reward is {reward!r}; expected one of dense, sparse")
        self.reward = reward

    @staticmethod
    def draw_goals(num_tasks: int, rng: np.random.Generator) -> Array:
        angles = rng.permutation(np.linspace(0, np.pi, num_tasks))
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def start(self, rng: np.random.Generator) -> Array:
        return np.zeros(2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        distance = norm(next_states - tasks)
        if self.reward == "dense":
            return {"distance": -distance}
        return {"nearness": self._nearness(distance)}

    def sparse_rewards(self, rewards: Array) -> Array:
        return rewards if self.reward == "sparse" else self._nearness(-rewards)

    def _nearness(self, distance: Array) -> Array:
        # Compare in the precision of the distances, so that rounding cannot move a point out of the radius.
        radius = distance.dtype.type(self.goal_radius)
        return np.where(distance <= radius, 1 - distance, distance.dtype.type(0))
