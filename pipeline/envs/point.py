"""Point robots in the plane, with and without goals: cheap tasks in which adaptation is easy to see."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs.contract import BatchStep, Component, MetaEnv, RowBatch, TaskField
from metaloom.pipeline.envs.pictures import Picture, RenderedEnv
from metaloom.pipeline.types import Array

GOAL = (
    TaskField("goal_x", "m", "where to go, first coordinate"),
    TaskField("goal_y", "m", "where to go, second coordinate"),
)


class PointRobot(RenderedEnv):
    """Base class for point robots, used together with MetaEnv. A subclass defines the rules for n points.

    | observation | unit | | action | unit | range                 |
    | ----------- | ---- |-| ------ | ---- | --------------------- |
    | x, y        | m    | | dx, dy | m    | ±0.1; to corners ±0.2 |

    A single point (`step`) and a batch apply the same rules row by row, so their results are bitwise identical.
    """

    reach: ClassVar[float] = 2.5  # half the side of the rendered square, in m
    max_action: ClassVar[float]
    state_size: ClassVar[int] = 2
    observation_components: Sequence[tuple[str, str]] | None = (Component("x", "m"), Component("y", "m"))
    action_components: tuple[Component, Component] = (Component("dx", "m"), Component("dy", "m"))

    def __init__(self) -> None:
        super().__init__()
        self._seen = [np.zeros(self.state_size)]
        self.observation_space: gymnasium.Space[Any] = Box(-np.inf, np.inf, (self.state_size,), np.float64)
        self.action_space: gymnasium.Space[Any] = Box(-self.max_action, self.max_action, (2,), np.float64)
        if self.state_size != len(self.observation_components or ()):  # the subclass does not name its components
            self.observation_components = None

    @abstractmethod
    def start(self, rng: np.random.Generator) -> Array:
        """Draw an episode's initial state, [S]."""

    def advance(self, states: Array, actions: Array, tasks: Array) -> Array:
        """Return the states after one step, [n, S]. Actions are clipped."""
        return states + np.clip(actions, -self.max_action, self.max_action)

    @abstractmethod
    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        """Return the reward terms, keyed by name, [n] each, for moving from `states` to `next_states`."""

    def terminal(self, states: Array, tasks: Array) -> Array:
        """Return a mask [n], True for states that terminate the episode. By default, none does."""
        return np.zeros(len(states), np.bool_)

    def facts_of(self, states: Array, tasks: Array) -> dict[str, Array]:
        """Return the declared facts, keyed by name, [n] each, for the new states. There are none by default."""
        return {}

    def whereabouts(self) -> Array:
        """Return the point's position, [2] in m."""
        return np.array(self._seen[-1][:2])

    def render(self) -> Any:
        """Return an image of the path since the reset, this goal, and other tasks' goals, [height, width, 3] uint8."""
        assert isinstance(self, MetaEnv), "a point has tasks"
        picture = Picture(self.reach)
        if self.task_fields[:2] == GOAL:
            picture.tasks(np.array(self.task_set or ()).reshape(-1, len(self.task_fields)))
            picture.goal(self.task[:2])
        self.draw_scene(picture)
        picture.path(np.array(self._seen)[:, :2])
        return picture.pixels()

    def draw_scene(self, picture: Picture) -> None:
        """Draw objects below the point's path. The default draws nothing."""

    def row_batch(self, num_rows: int, num_threads: int) -> "PointBatch":
        return PointBatch(self, num_rows)


class PointBatch(RowBatch):
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
    """Go to the origin: a single task, for tests without adaptation (MetaPointEnv).

    Observation and action: see PointRobot. Task parameters: none. Start: U(-2, 2) per axis. Reward term: distance =
    -‖s'‖, m. Terminates when |x| and |y| are both below 0.01 m.
    """

    task_set: tuple[tuple[()]] = ((),)
    max_action: float = 0.1
    near: float = 0.01

    def start(self, rng: np.random.Generator) -> Array:
        return rng.uniform(-2, 2, 2)

    def reward_terms(self, states: Array, next_states: Array, tasks: Array) -> dict[str, Array]:
        return {"distance": -norm(next_states)}

    def terminal(self, states: Array, tasks: Array) -> Array:
        return np.asarray(np.all(np.abs(states) < self.near, axis=1))


class _ToGoal:
    """Rules of points that go from the origin to a goal drawn from a square; reaching it ends the episode."""

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


class Point2DGoal(_ToGoal, PointRobot, MetaEnv):
    """Go from the origin to a goal that the observation does not show (MetaPointEnv, version 2).

    | task field     | unit | distribution |
    | -------------- | ---- | ------------ |
    | goal_x, goal_y | m    | U(-2, 2)     |

    Observation and action: see PointRobot. Start: the origin. Reward term: distance = -‖s' - goal‖, m. Terminates when
    the point is within 0.01 m of the goal on both axes. The original instead checks the distance to the origin, where
    every episode starts.
    """

    goal_range: float = 2.0


class Navigation2D(_ToGoal, PointRobot, MetaEnv):
    """Go from the origin to a nearby goal that the observation does not show (2D navigation in the MAML paper).

    | task field     | unit | distribution |
    | -------------- | ---- | ------------ |
    | goal_x, goal_y | m    | U(-0.5, 0.5) |

    Observation and action: see PointRobot. Start: the origin. Reward term: distance = -‖s' - goal‖, m. Terminates when
    the point is within 0.01 m of the goal on both axes.
    """

    goal_range: float = 0.5
    reach: float = 0.8


def norm(vectors: Array) -> Array:
    """Return the Euclidean norms [n] of vectors [n, 2]."""
    # Write out the sum, since NumPy's summation order may depend on the number of rows.
    return np.sqrt(vectors[:, 0] * vectors[:, 0] + vectors[:, 1] * vectors[:, 1])
