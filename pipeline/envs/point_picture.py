"""Pictures of a point that goes somewhere in the plane."""

from itertools import pairwise

import numpy as np

from metaloom.pipeline.types import Array

SIDE = 320
"""Pixels of a picture, across and up."""
_GRID, _OTHERS, _WALL, _GOAL, _PATH, _POINT = (
    np.array(color, np.float64)
    for color in ((228, 228, 228), (205, 205, 205), (130, 90, 60), (60, 160, 75), (120, 150, 210), (25, 60, 150))
)


class PointPicture:
    """A square of the plane around the origin, onto which discs are drawn.

    Args:
        reach: half of the square's side, in m.
    """

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self._canvas = np.full((SIDE, SIDE, 3), 255.0)
        for line in range(-int(reach), int(reach) + 1):
            column, row = self._pixel(np.array([line, line])).round().astype(int)
            self._canvas[:, column] = self._canvas[row] = _GRID

    def tasks(self, goals: Array) -> None:
        """Mark where other tasks want the point to go, [n, 2] in m."""
        for goal in goals:
            self._disc(goal, 4, _OTHERS)

    def goal(self, goal: Array) -> None:
        """Mark where this task wants the point to go, [2] in m."""
        self._disc(goal, 7, _GOAL)

    def wall(self, radius: float, gap: Array, gap_reach: float) -> None:
        """Draw a round wall around the origin, but for what lies within reach of its gap, [2] in m."""
        angles = np.arange(0, 2 * np.pi, 0.02)
        places = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        for place in places[np.linalg.norm(places - gap, axis=1) > gap_reach]:
            self._disc(place, 1.5, _WALL)

    def path(self, places: Array) -> None:
        """Draw where the point has been, [n, 2] in m, and the point itself at the last of them."""
        for place, following in pairwise(places):
            steps = max(int(np.abs(self._pixel(following) - self._pixel(place)).max() / 2), 1)
            for share in np.arange(steps) / steps:
                self._disc(place + share * (following - place), 1.5, _PATH)
        for place in places[:-1]:
            self._disc(place, 2.5, _PATH)
        self._disc(places[-1], 5, _POINT)

    def pixels(self) -> Array:
        """[SIDE, SIDE, 3] uint8."""
        return self._canvas.round().astype(np.uint8)

    def _pixel(self, place: Array) -> Array:
        """Column and row of a place; the second axis points up."""
        return (np.array([place[0], -place[1]]) / self._reach + 1) / 2 * (SIDE - 1)

    def _disc(self, place: Array, radius: float, color: Array) -> None:
        center = self._pixel(place)
        low = np.clip(np.floor(center - radius - 1), 0, SIDE).astype(int)
        high = np.clip(np.ceil(center + radius + 2), 0, SIDE).astype(int)
        columns, rows = np.arange(low[0], high[0]), np.arange(low[1], high[1])
        distance = np.hypot(columns[None] - center[0], rows[:, None] - center[1])
        # Pixels that the edge passes are mixed, so that it looks smooth.
        cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]
        patch = self._canvas[low[1] : high[1], low[0] : high[0]]
        patch += cover * (color - patch)
