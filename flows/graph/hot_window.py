"""The newest rows of a matrix that only grows at its end."""

import numpy as np

from metaloom.pipeline.types import Array


class HotWindow:
    """A ring of float32 rows: of all rows that were numbered so far, places for the newest `capacity`.

    A place is filled when its row is written, in any order; what was not written is not told from what was.
    """

    def __init__(self, capacity: int, width: int) -> None:
        # The system gives memory to pages of it as they are first written.
        self._rows = np.empty((capacity, width), np.float32)
        self._stop = 0

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return len(self._rows)

    @property
    def start(self) -> int:
        """The oldest row that has a place."""
        return max(0, self._stop - self.capacity)

    def advance(self, stop: int) -> None:
        """The newest row is now `stop` - 1: places of the oldest rows become places of the newest."""
        self._stop = stop

    def write(self, first: int, rows: Array) -> None:
        """Fill the places of the rows from `first` on, all of which have one."""
        self._rows[np.arange(first, first + len(rows)) % self.capacity] = rows

    def gather(self, rows: Array) -> Array:
        """[n, W] copies of the rows [n]; anything for those that have no place."""
        return self._rows.take(rows % self.capacity, axis=0)
