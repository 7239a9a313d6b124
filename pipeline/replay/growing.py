"""Tables of integers that grow at their end."""

import numpy as np

from metaloom.pipeline.types import Array


class GrowingColumns:
    """Columns of int64 that grow together. Appending takes amortised constant time per row."""

    def __init__(self, num_columns: int) -> None:
        self._data = np.empty((num_columns, 16), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, *columns: Array | int) -> None:
        """Append one row of integers, or as many as the given columns are long."""
        stop = self._size + max(np.size(column) for column in columns)
        if stop > self._data.shape[1]:
            grown = np.empty((len(self._data), max(stop, 2 * self._data.shape[1])), np.int64)
            grown[:, : self._size] = self._data[:, : self._size]
            self._data = grown
        for target, column in zip(self._data, columns, strict=True):
            target[self._size : stop] = column
        self._size = stop

    def __getitem__(self, column: int) -> Array:
        """Return a column, as a view that is valid until the next append."""
        return self._data[column, : self._size]
