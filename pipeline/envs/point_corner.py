"""Point robots that go to one of four corners: directly, through walls, or by accelerating."""

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np

from metaloom.pipeline.envs.contract import Component, EnvError, Fact, MetaEnv, TaskField
from metaloom.pipeline.envs.pictures import Picture
from metaloom.pipeline.envs.point import GOAL, PointRobot, norm
from metaloom.pipeline.envs.task_classes import Classes, nearest
from metaloom.pipeline.types import Array

RewardName = Literal["dense", "dense_squared", "sparse"]

CORNERS = ((-2.0, -2.0), (-2.0, 2.0), (2.0, -2.0), (2.0, 2.0))
CORNER_NAMES: dict[str, tuple[float, float]] = dict(
    zip(("lower left", "upper left", "lower right", "upper right"), CORNERS, strict=True)
)


class _ToCorner:
    """Rules of points that go to one of four corners, and their rewards."""

    task_fields: tuple[TaskField, TaskField] = GOAL
    task_set: tuple[tuple[float, float], tuple[float, float], tuple[float, float], tuple[float, float]] = CORNERS
    task_classes: Classes | None = nearest(("goal_x", "goal_y"), CORNER_NAMES)
    max_action: float = 0.2
    rewards: ClassVar[tuple[RewardName, ...]] = ("dense", "dense_squared", "sparse")
    sparse_radius: float

    def __init__(self, reward: RewardName = "sparse", success_radius: float | None = None) -> None:
        super().__init__()
        where = type(self).__name__
        if reward not in self.rewards:
            raise EnvError(f"{where}: reward is {reward!r}; expected one of {', '.join(self.rewards)}")
        if success_radius is not None and not (np.isfinite(success_radius) and success_radius > 0):
            raise EnvError(f"{where}: success_radius is {success_radius}; expected a length above 0, in m, or null")
        self.reward: RewardName = reward
        self.success_radius = success_radius
        if success_radius is not None:
            self.facts: tuple[Fact, Fact] = (Fact("success", "flag"), Fact("goal_distance", unit="m"))

    def start(self, rng: np.random.Generator) -> Array:
        return rng.uniform(-0.2, 0.2, 2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        distance = norm(next_states[:, :2] - tasks[:, :2])
        if self.reward == "dense":
            return {"distance": -distance}
        if self.reward == "dense_squared":
            return {"squared_distance": -np.square(distance)}
        return self.sparse_terms(states, next_states, tasks, distance)

    def facts_of(self, states: Array, tasks: Array) -> dict[str, Array]:
        if self.success_radius is None:
            return {}
        distance = norm(states[:, :2] - tasks[:, :2])
        return {"success": distance <= self.success_radius, "goal_distance": distance}

    @abstractmethod
    def sparse_terms(self, states: Array, next_states: Array, tasks: Array, distance: Array) -> dict[str, Array]:
        """Return the reward term of the sparse variant; `distance` [n] is the distance to the goal after the step."""


class PointCorner(_ToCorner, PointRobot, MetaEnv):
    """Go to one of four corners; only the reward reveals which (MetaPointEnvCorner).

    | task field     | unit | distribution                                     |
    | -------------- | ---- | ------------------------------------------------ |
    | goal_x, goal_y | m    | uniform over (±2, ±2), with replacement; id 0-3  |

    | option `reward`  | term             | value, with d the distance to the goal, m                           |
    | ---------------- | ---------------- | ------------------------------------------------------------------- |
    | dense            | distance         | -d(s')                                                              |
    | dense_squared    | squared_distance | -d(s')², m²                                                         |
    | sparse (default) | progress         | d(s) - d(s') where ‖s'‖₁ >= 0.5 m and no corner is nearer, else 0   |

    | fact (with option `success_radius`) | kind   | value                         |
    | ----------------------------------- | ------ | ----------------------------- |
    | success                             | flag   | d(s') <= `success_radius`     |
    | goal_distance                       | number | d(s'), m                      |

    Observation and action: see PointRobot. Start: U(-0.2, 0.2) per axis. Never terminates.
    """

    sparse_radius: float = 0.5

    def sparse_terms(self, states: Array, next_states: Array, tasks: Array, distance: Array) -> dict[str, Array]:
        progress = norm(states - tasks) - distance
        outside = np.abs(next_states).sum(axis=1) >= self.sparse_radius
        nearest = (next_states * tasks >= 0).all(axis=1)
        return {"progress": np.where(outside & nearest, progress, 0.0)}


class PointWalls(_ToCorner, PointRobot, MetaEnv):
    """Go to one of four corners through two circular walls, each with one gap (MetaPointEnvWalls).

    | task field         | unit | distribution                               |
    | ------------------ | ---- | ------------------------------------------ |
    | goal_x, goal_y     | m    | uniform over (±2, ±2), with replacement    |
    | gap_1_x, gap_1_y   | m    | uniform on the circle of radius 1 m        |
    | gap_2_x, gap_2_y   | m    | uniform on the circle of radius 2 m        |

    An outward move through the wall of radius 1 or 2 passes only if it ends within 1 m of that wall's gap. Otherwise,
    it ends just inside the wall, in the same direction. Inward moves are unrestricted.

    | option `reward` | term     | value, with d the distance to the goal, m          |
    | --------------- | -------- | -------------------------------------------------- |
    | dense (default) | distance | -d(s')                                             |
    | sparse          | progress | d(s) - d(s') where d(s') < 2 m, else 0             |

    Observation and action: see PointRobot. Start: U(-0.2, 0.2) per axis. Never terminates. Facts: see PointCorner.
    Differs from the original: the reward uses the point's actual position, not the intended one beyond the wall; the
    sparse reward is 0 outside its radius, where the original returns nothing; and a point exactly on a wall counts as
    inside, where the original fails.
    """

    task_fields: tuple[TaskField, TaskField, TaskField, TaskField, TaskField, TaskField] = (
        *GOAL,
        TaskField("gap_1_x", "m", "opening of the inner wall, first coordinate"),
        TaskField("gap_1_y", "m", "opening of the inner wall, second coordinate"),
        TaskField("gap_2_x", "m", "opening of the outer wall, first coordinate"),
        TaskField("gap_2_y", "m", "opening of the outer wall, second coordinate"),
    )
    task_set: None = None
    rewards: tuple[Literal["dense"], Literal["sparse"]] = ("dense", "sparse")
    sparse_radius: float = 2.0
    gap_reach: float = 1.0

    def __init__(self, reward: RewardName = "dense", success_radius: float | None = None) -> None:
        super().__init__(reward, success_radius)

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        goals = np.array(CORNERS)[rng.integers(len(CORNERS), size=num_tasks)]
        angles = rng.uniform(0, 2 * np.pi, (num_tasks, 2))
        inner, outer = (r * np.stack([np.cos(a), np.sin(a)], axis=1) for r, a in zip((1, 2), angles.T, strict=True))
        return np.concatenate([goals, inner, outer], axis=1)

    def draw_scene(self, picture: Picture) -> None:
        for radius, gap in ((1.0, self.task[2:4]), (2.0, self.task[4:6])):
            picture.wall(radius, gap, self.gap_reach)

    def advance(self, states: Array, actions: Array, tasks: Array) -> Array:
        moved = super().advance(states, actions, tasks)
        radius, next_radius = norm(states), norm(moved)
        for wall, gaps in ((1.0, tasks[:, 2:4]), (2.0, tasks[:, 4:6])):
            crosses = (radius <= wall) & (next_radius > wall)
            blocked = crosses & (norm(moved - gaps) > self.gap_reach)
            shrink = np.where(blocked, next_radius / wall + 1e-6, 1.0)
            moved = moved / shrink[:, None]
        return moved

    def sparse_terms(self, states: Array, next_states: Array, tasks: Array, distance: Array) -> dict[str, Array]:
        progress = norm(states - tasks[:, :2]) - distance
        return {"progress": np.where(distance < self.sparse_radius, progress, 0.0)}


class PointMomentum(_ToCorner, PointRobot, MetaEnv):
    """Go to one of four corners by accelerating (MetaPointEnvMomentum).

    | observation | unit   | | action   | unit    | range |
    | ----------- | ------ |-| -------- | ------- | ----- |
    | x, y        | m      | | dvx, dvy | m/step² | ±0.1  |
    | vx, vy      | m/step | |          |         |       |

    | task field     | unit | distribution                                     |
    | -------------- | ---- | ------------------------------------------------ |
    | goal_x, goal_y | m    | uniform over (±2, ±2), with replacement; id 0-3  |

    | option `reward`  | term             | value, with d the distance to the goal, m |
    | ---------------- | ---------------- | ----------------------------------------- |
    | dense            | distance         | -d(s')                                    |
    | dense_squared    | squared_distance | -d(s')², m²                               |
    | sparse (default) | nearness         | max(2 - d(s'), 0)                         |

    A step first updates the velocity, then moves the point with it. The speed is unlimited. Start: position U(-0.2,
    0.2), velocity U(-0.1, 0.1) per axis. Never terminates. Facts: see PointCorner.
    """

    max_action: float = 0.1
    state_size = 4
    observation_components: tuple[Component, ...] = tuple(
        Component(name, unit) for name, unit in (("x", "m"), ("y", "m"), ("vx", "m/step"), ("vy", "m/step"))
    )
    action_components: tuple[Component, Component] = (Component("dvx", "m/step"), Component("dvy", "m/step"))
    sparse_radius: float = 2.0

    def start(self, rng: np.random.Generator) -> Array:
        return np.concatenate([rng.uniform(-0.2, 0.2, 2), rng.uniform(-0.1, 0.1, 2)])

    def advance(self, states: Array, actions: Array, tasks: Array) -> Array:
        velocities = states[:, 2:] + np.clip(actions, -self.max_action, self.max_action)
        return np.concatenate([states[:, :2] + velocities, velocities], axis=1)

    def sparse_terms(self, states: Array, next_states: Array, tasks: Array, distance: Array) -> dict[str, Array]:
        return {"nearness": np.maximum(self.sparse_radius - distance, 0.0)}
