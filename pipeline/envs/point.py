"""Point robots in the plane, with and without goals: cheap tasks with visible adaptation."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs.contract import BatchStep, Component, EnvError, MetaEnv, RowBatch, TaskField, keeps_rules
from metaloom.pipeline.types import Array

SIDE = 320
"""Width and height of an image in pixels."""
_GRID, _OTHERS, _WALL, _GOAL, _PATH, _POINT = (
    np.array(color, np.float64)
    for color in ((228, 228, 228), (205, 205, 205), (130, 90, 60), (60, 160, 75), (120, 150, 210), (25, 60, 150))
)


class PointPicture:
    """Image of a square around the origin, onto which discs are drawn.

    Args:
        reach: Half of the square's side, in m.
    """

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self._canvas = np.full((SIDE, SIDE, 3), 255.0)
        for line in range(-int(reach), int(reach) + 1):
            column, row = self._pixel(np.array([line, line])).round().astype(int)
            self._canvas[:, column] = self._canvas[row] = _GRID

    def tasks(self, goals: Array) -> None:
        """Mark the goals of other tasks, [n, 2] in m."""
        for goal in goals:
            self._disc(goal, 4, _OTHERS)

    def goal(self, goal: Array) -> None:
        """Mark the goal of this task, [2] in m."""
        self._disc(goal, 7, _GOAL)

    def wall(self, radius: float, gap: Array, gap_reach: float) -> None:
        """Draw a circular wall around the origin, open within `gap_reach` of `gap`, [2] in m."""
        angles = np.arange(0, 2 * np.pi, 0.02)
        places = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        for place in places[np.linalg.norm(places - gap, axis=1) > gap_reach]:
            self._disc(place, 1.5, _WALL)

    def path(self, places: Array) -> None:
        """Draw the point's path, [n, 2] in m, and the point at its end."""
        for place, following in pairwise(places):
            steps = max(int(np.abs(self._pixel(following) - self._pixel(place)).max() / 2), 1)
            for share in np.arange(steps) / steps:
                self._disc(place + share * (following - place), 1.5, _PATH)
        for place in places[:-1]:
            self._disc(place, 2.5, _PATH)
        self._disc(places[-1], 5, _POINT)

    def pixels(self) -> Array:
        """Return the image [SIDE, SIDE, 3] uint8."""
        return self._canvas.round().astype(np.uint8)

    def _pixel(self, place: Array) -> Array:
        """Return column and row of a position, with y pointing up."""
        return (np.array([place[0], -place[1]]) / self._reach + 1) / 2 * (SIDE - 1)

    def _disc(self, place: Array, radius: float, color: Array) -> None:
        center = self._pixel(place)
        low = np.clip(np.floor(center - radius - 1), 0, SIDE).astype(int)
        high = np.clip(np.ceil(center + radius + 2), 0, SIDE).astype(int)
        columns, rows = np.arange(low[0], high[0]), np.arange(low[1], high[1])
        distance = np.hypot(columns[None] - center[0], rows[:, None] - center[1])
        # Pixels on the edge are blended (antialiasing).
        cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]
        patch = self._canvas[low[1] : high[1], low[0] : high[0]]
        patch += cover * (color - patch)


GOAL = (
    TaskField("goal_x", "m", "where to go, first coordinate"),
    TaskField("goal_y", "m", "where to go, second coordinate"),
)


class PointRobot(gymnasium.Env[Array, Array]):
    """Base class of point robots, used together with MetaEnv; a subclass defines rules for n points.

    | observation | unit | | action | unit | range                 |
    | ----------- | ---- |-| ------ | ---- | --------------------- |
    | x, y        | m    | | dx, dy | m    | ±0.1; to corners ±0.2 |

    A single point (`step`) and a batch use the same rowwise rules, so they agree bit for bit.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode: str = "rgb_array"
    reach: ClassVar[float] = 2.5
    """Half the side of an image, in m."""
    max_action: ClassVar[float]
    state_size: ClassVar[int] = 2
    observation_components: Sequence[tuple[str, str]] | None = (Component("x", "m"), Component("y", "m"))
    action_components: tuple[Component, Component] = (Component("dx", "m"), Component("dy", "m"))

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if issubclass(cls, MetaEnv) and cls.mro().index(MetaEnv) < cls.mro().index(PointRobot):
            raise EnvError(f"{cls.__name__} lists MetaEnv before PointRobot; required PointRobot first")

    def __init__(self) -> None:
        self.observation_space: gymnasium.Space[Any] = Box(-np.inf, np.inf, (self.state_size,), np.float64)
        self.action_space: gymnasium.Space[Any] = Box(-self.max_action, self.max_action, (2,), np.float64)
        self._path = [np.zeros(self.state_size)]
        if self.state_size != len(self.observation_components or ()):  # a subclass without its own names
            self.observation_components = None

    @abstractmethod
    def start(self, rng: np.random.Generator) -> Array:
        """Draw the initial state of an episode, [S]."""

    def advance(self, states: Array, actions: Array, tasks: Array) -> Array:
        """Return the states after one step, [n, S], with clipped actions."""
        return states + np.clip(actions, -self.max_action, self.max_action)

    @abstractmethod
    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        """Return the terms of the reward for moving from `states` to `next_states` by name, [n] each."""

    def terminal(self, states: Array, tasks: Array) -> Array:
        """Return True for states that end an episode, [n]; by default never."""
        return np.zeros(len(states), np.bool_)

    def facts_of(self, states: Array, tasks: Array) -> dict[str, Array]:
        """Return the declared facts of the new states by name, [n] each; by default none."""
        return {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._path = [(answer := super().reset(seed=seed))[0]]
        return answer

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        self._path.append((answer := super().step(action))[0])
        return answer

    def whereabouts(self) -> Array:
        """Return the position of the point, [2], in m."""
        return np.array(self._path[-1][:2])

    def render(self) -> Any:
        """Return an image [height, width, 3] uint8: the path since the last reset, the goal, and other tasks' goals."""
        assert isinstance(self, MetaEnv), "a point has tasks"
        picture = PointPicture(self.reach)
        if self.task_fields[:2] == GOAL:
            picture.tasks(np.array(self.task_set or ()).reshape(-1, len(self.task_fields)))
            picture.goal(self.task[:2])
        self.draw_scene(picture)
        picture.path(np.array(self._path)[:, :2])
        return picture.pixels()

    def draw_scene(self, picture: PointPicture) -> None:
        """Draw objects below the point's path; by default nothing."""

    def row_batch(self, num_rows: int, num_threads: int) -> "PointBatch":
        return PointBatch(self, num_rows)

    def batch(self, num_rows: int, num_threads: int) -> "PointBatch | None":
        return self.row_batch(num_rows, num_threads) if keeps_rules(self, PointRobot) else None


class PointBatch(RowBatch):
    """A batch of N points, stepped as arrays."""

    action_size = 2

    def __init__(self, robot: PointRobot, num_rows: int) -> None:
        self._robot = robot
        self.num_rows = num_rows
        self.observation_size: int = robot.state_size
        self._states = np.zeros((num_rows, robot.state_size))

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        for row, rng in enumerate(rngs):
            self._states[row] = self._robot.start(rng)
        return self._states.copy()

    def step(self, actions: Array, rows: Array) -> BatchStep:
        states, tasks = self._states[rows], self.tasks[rows]
        next_states = self._robot.advance(states, actions, tasks)
        self._states[rows] = next_states
        terms = self._robot.reward_terms(states, next_states, tasks)
        terminated = self._robot.terminal(next_states, tasks)
        facts = self._robot.facts_of(next_states, tasks)
        return BatchStep(next_states, terms, terminated, np.zeros(len(rows), np.bool_), facts)

    @property
    def state(self) -> Array:
        return self._states.copy()


class Point2D(PointRobot, MetaEnv):
    """Go to the origin: a single task, for checks without adaptation (MetaPointEnv).

    Observation and action: see PointRobot. Task parameters: none. Start: U(-2, 2) per axis. Reward term: distance =
    -‖s'‖, m. Terminates when |x| and |y| are both below 0.01 m.
    """

    task_set: tuple[tuple[()]] = ((),)
    max_action: float = 0.1
    near: float = 0.01

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return np.zeros((num_tasks, 0))

    def start(self, rng: np.random.Generator) -> Array:
        return rng.uniform(-2, 2, 2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        return {"distance": -norm(next_states)}

    def terminal(self, states: Array, tasks: Array) -> Array:
        return np.asarray(np.all(np.abs(states) < self.near, axis=1))


class _GoalPoint(PointRobot, MetaEnv):
    """A point that starts at the origin and goes to a goal drawn from a square, where the episode ends."""

    task_fields: tuple[TaskField, TaskField] = GOAL
    max_action: float = 0.1
    near: float = 0.01
    goal_range: ClassVar[float]

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return rng.uniform(-self.goal_range, self.goal_range, (num_tasks, 2))

    def start(self, rng: np.random.Generator) -> Array:
        return np.zeros(2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        return {"distance": -norm(next_states - tasks)}

    def terminal(self, states: Array, tasks: Array) -> Array:
        return np.asarray(np.all(np.abs(states - tasks) < self.near, axis=1))


class Point2DGoal(_GoalPoint):
    """Go from the origin to a goal that the observation does not show (MetaPointEnv, version 2).

    | task field     | unit | distribution |
    | -------------- | ---- | ------------ |
    | goal_x, goal_y | m    | U(-2, 2)     |

    Observation and action: see PointRobot. Start: the origin. Reward term: distance = -‖s' - goal‖, m. Terminates when
    the point is within 0.01 m of the goal on both axes. Differs from the original, which tests for nearness to the
    origin, where every episode starts.
    """

    goal_range: float = 2.0


class Navigation2D(_GoalPoint):
    """Go from the origin to a near goal that the observation does not show (2-D navigation of MAML's paper).

    | task field     | unit | distribution |
    | -------------- | ---- | ------------ |
    | goal_x, goal_y | m    | U(-0.5, 0.5) |

    Observation and action: see PointRobot. Start: the origin. Reward term: distance = -‖s' - goal‖, m. Terminates when
    the point is within 0.01 m of the goal on both axes.
    """

    goal_range: float = 0.5
    reach: float = 0.8


def norm(vectors: Array) -> Array:
    """Return the lengths [n] of vectors [n, 2]."""
    # Written out, since numpy's order of summation may depend on the number of rows.
    return np.sqrt(vectors[:, 0] * vectors[:, 0] + vectors[:, 1] * vectors[:, 1])
