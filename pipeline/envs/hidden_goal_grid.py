"""A grid with a hidden goal that an agent must find once and then remember (VariBAD's gridworld)."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import BatchStep, EnvError, Fact, MetaEnv, RowBatch, TaskField, require_count
from metaloom.pipeline.envs.pictures import Picture, RenderedEnv
from metaloom.pipeline.types import Array

Excluded = Literal["block", "start"]

MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)], np.int64)
STEP_REWARD, GOAL_REWARD = -0.1, 1.0


def goals_of(size: int, excluded: Excluded) -> list[tuple[int, int]]:
    """Return the possible goal cells: all except the start (0, 0), or all except the 2x2 block at the start."""
    near = 2 if excluded == "block" else 1
    cells = [(x, y) for x in range(size) for y in range(size)]
    return [(x, y) for x, y in cells if x >= near or y >= near]


class HiddenGoalGrid(RenderedEnv, MetaEnv):
    """Find a goal cell that only the reward reveals (VariBAD's gridworld).

    | observation | unit | | action               | unit | range |
    | ----------- | ---- |-| -------------------- | ---- | ----- |
    | one-hot     | 1    | | +x, -x, +y, -y, stay | 1    | 0 - 4 |

    The one-hot vector is 1 at index `size` * x + y for the cell (x, y).

    | task field     | unit | distribution                                                                   |
    | -------------- | ---- | ------------------------------------------------------------------------------ |
    | goal_x, goal_y | 1    | uniform over the cells, except the start's 2x2 (21 goals) or the start (24)    |

    | reward term | value                                   |
    | ----------- | --------------------------------------- |
    | goal        | 1 in a step that ends on the goal       |
    | search      | -0.1 in every other step                |

    | fact    | kind | value                          |
    | ------- | ---- | ------------------------------ |
    | success | flag | the step ends on the goal      |

    Options: `size`, number of cells along a side, default 5; `excluded`, the cells that cannot be the goal: `block`
    (default), the 2x2 cells at the start, or `start`, only the start. Start: cell (0, 0). Moves off the grid have no
    effect. Never terminates; max_episode_steps is the horizon, 15 in VariBAD's experiments with 4 episodes per trial.
    """

    task_fields: tuple[TaskField, TaskField] = (
        TaskField("goal_x", "1", "column of the goal"),
        TaskField("goal_y", "1", "row of the goal"),
    )
    action_components: tuple[()] = ()
    facts: tuple[Fact] = (Fact("success", "flag"),)

    def __init__(self, size: int = 5, excluded: Excluded = "block") -> None:
        super().__init__()
        require_count(self, "size", size, least=3)
        if excluded not in get_args(Excluded):
            raise EnvError(f"{type(self).__name__}: excluded is {excluded}; expected one of block, start")
        self.size = size
        self.task_set: tuple[tuple[float, float], ...] = tuple(
            (float(x), float(y)) for x, y in goals_of(size, excluded)
        )
        self.observation_space: gymnasium.Space[Any] = Box(0, 1, (size * size,), np.float64)
        self.action_space: gymnasium.Space[Any] = Discrete(len(MOVES))
        self.observation_components: tuple[tuple[str, Literal["1"]], ...] = tuple(
            (f"cell_{n // size}_{n % size}", "1") for n in range(size * size)
        )

    def set_task(self, task: Array) -> None:
        super().set_task(task)
        if not ((self.task >= 0) & (self.task < self.size) & (self.task % 1 == 0)).all():
            found = f"{type(self).__name__}.set_task: got the goal {self.task.tolist()}"
            raise EnvError(f"{found}; expected the coordinates of a cell, each an integer from 0 to {self.size - 1}")

    def render(self) -> Any:
        """Return an image of this goal, other tasks' goals, and the path since the reset, [height, width, 3] uint8."""
        half, middle = self.size / 2, (self.size - 1) / 2
        picture = Picture(half, np.arange(-half, half + 1))
        picture.tasks(np.array(self.task_set) - middle)
        picture.goal(self.task - middle, radius=20)
        cells = [divmod(int(seen.argmax()), self.size) for seen in self._seen]
        picture.path(np.array([(0, 0), *cells]) - middle)
        return picture.pixels()

    def row_batch(self, num_rows: int, num_threads: int) -> "GridBatch":
        return GridBatch(num_rows, self.size)


class GridBatch(RowBatch):
    action_size = 1

    def __init__(self, num_rows: int, size: int) -> None:
        self.num_rows: int = num_rows
        self.observation_size: int = size * size
        self._size, self._unit = size, np.eye(size * size)
        self._cells = np.zeros((num_rows, 2), np.int64)

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        self._cells[:] = 0
        return self._seen(self._cells)

    def step(self, actions: Array, rows: Array) -> BatchStep:
        cells = np.clip(self._cells[rows] + MOVES[actions.reshape(-1)], 0, self._size - 1)
        self._cells[rows] = cells
        found = (cells == self.tasks[rows]).all(axis=1)
        terms = {"goal": np.where(found, GOAL_REWARD, 0.0), "search": np.where(found, 0.0, STEP_REWARD)}
        none = np.zeros(len(rows), np.bool_)
        return BatchStep(self._seen(cells), terms, none, none, {"success": found})

    def _seen(self, cells: Array) -> Array:
        return self._unit[cells[:, 0] * self._size + cells[:, 1]]

    @property
    def state(self) -> Array:
        return self._cells.astype(np.float64)
