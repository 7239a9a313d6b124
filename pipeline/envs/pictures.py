"""Images of environments that draw themselves, without an imaging package."""

from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import numpy as np

from metaloom.pipeline.envs.contract import BatchEnv, EnvError, MetaEnv, keeps_rules
from metaloom.pipeline.types import Array

SIDE = 320  # width and height of images, in pixels
_GRID, _OTHERS, _WALL, _GOAL, _PATH, _POINT = (
    np.array(color, np.float64)
    for color in ((228, 228, 228), (205, 205, 205), (130, 90, 60), (60, 160, 75), (120, 150, 210), (25, 60, 150))
)


class Picture:
    """Image of a square around the origin, onto which disks are drawn.

    `reach` is half of the square's side, in m. `lines` are the positions of grid lines; the default is one per meter.
    """

    def __init__(self, reach: float, lines: Array | None = None) -> None:
        self._reach = reach
        self._canvas = np.full((SIDE, SIDE, 3), 255.0)
        for line in np.arange(-int(reach), int(reach) + 1) if lines is None else lines:
            column, row = self._pixel(np.array([line, line])).round().astype(int)
            self._canvas[:, column] = self._canvas[row] = _GRID

    def tasks(self, goals: Array) -> None:
        """Mark the goals of other tasks, [n, 2] in m."""
        for goal in goals:
            self._disc(goal, 4, _OTHERS)

    def goal(self, goal: Array, radius: float = 7) -> None:
        """Mark this task's goal, [2] in m, with a disk of the given radius in pixels."""
        self._disc(goal, radius, _GOAL)

    def wall(self, radius: float, gap: Array, gap_reach: float) -> None:
        """Draw a circular wall around the origin that is open within `gap_reach` of the point `gap`, [2] in m."""
        angles = np.arange(0, 2 * np.pi, 0.02)
        places = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        for place in places[np.linalg.norm(places - gap, axis=1) > gap_reach]:
            self._disc(place, 1.5, _WALL)

    def path(self, places: Array) -> None:
        """Draw a path, [n, 2] in m, and the agent at its end."""
        for place, following in pairwise(places):
            steps = max(int(np.abs(self._pixel(following) - self._pixel(place)).max() / 2), 1)
            for share in np.arange(steps) / steps:
                self._disc(place + share * (following - place), 1.5, _PATH)
        for place in places[:-1]:
            self._disc(place, 2.5, _PATH)
        self._disc(places[-1], 5, _POINT)

    def pixels(self) -> Array:
        """Return the image, [SIDE, SIDE, 3] uint8."""
        return self._canvas.round().astype(np.uint8)

    def _pixel(self, place: Array) -> Array:
        """Return the pixel column and row of a position [2] in m, in coordinates whose y axis points up."""
        return (np.array([place[0], -place[1]]) / self._reach + 1) / 2 * (SIDE - 1)

    def _disc(self, place: Array, radius: float, color: Array) -> None:
        center = self._pixel(place)
        low = np.clip(np.floor(center - radius - 1), 0, SIDE).astype(int)
        high = np.clip(np.ceil(center + radius + 2), 0, SIDE).astype(int)
        columns, rows = np.arange(low[0], high[0]), np.arange(low[1], high[1])
        distance = np.hypot(columns[None] - center[0], rows[:, None] - center[1])
        # Blend pixels at the edge (antialiasing).
        cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]
        patch = self._canvas[low[1] : high[1], low[0] : high[0]]
        patch += cover * (color - patch)


def table_picture(means: Array, taken: Array) -> Array:
    """Return a bar chart of actions per state, in which wide bars show mean rewards and narrow bars show counts.

    The best action is green. Mean rewards and counts are [states, actions]. A narrow bar has full height at the largest
    count, or at ten if all counts are smaller.
    """
    rows = int(len(means) ** 0.5)
    columns = -(-len(means) // rows)
    height, width = SIDE // rows, SIDE // columns
    low, high = min(means.min(), 0.0), max(means.max(), 1.0)
    canvas = np.full((SIDE, SIDE, 3), 255.0)
    for state, of_state in enumerate(means):
        row, column = divmod(state, columns)
        panel = canvas[row * height : (row + 1) * height, column * width : (column + 1) * width]
        slot = (width - 8) / len(of_state)
        for action, mean in enumerate(of_state):
            used = high * taken[state, action] / max(10, taken.max())
            wide = _GOAL if mean == of_state.max() else _OTHERS
            for value, share, color in ((mean, 0.9, wide), (used, 0.3, _POINT)):
                top, bottom = 6 + (height - 12) * (high - np.sort([0, value])[::-1]) / (high - low)
                left = 4 + (action + (1 - share) / 2) * slot
                panel[round(top) : round(bottom) + 1, round(left) : round(left + share * slot)] = color
    return canvas.round().astype(np.uint8)


class RenderedEnv(gymnasium.Env[Array, Any]):
    """Base class for environments that draw their episodes. List it before MetaEnv."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode: str = "rgb_array"

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if issubclass(cls, MetaEnv) and cls.mro().index(MetaEnv) < cls.mro().index(RenderedEnv):
            name = next(base.__name__ for base in cls.__bases__ if issubclass(base, RenderedEnv))
            raise EnvError(f"{cls.__name__} lists MetaEnv before {name}; list {name} first")

    def __init__(self) -> None:
        self._seen: list[Array] = []
        self._actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        answer = super().reset(seed=seed)
        self._seen, self._actions = [answer[0]], []
        return answer

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        answer = super().step(action)
        self._seen.append(answer[0])
        self._actions.append(action)
        return answer

    def batch(self, num_rows: int, num_threads: int) -> BatchEnv | None:
        assert isinstance(self, MetaEnv), "its rules are in a row_batch"
        return self.row_batch(num_rows, num_threads) if keeps_rules(self, RenderedEnv) else None
