"""Index of a run's transitions: the location of each, and the rows of each task.

Row indices number the real steps of a run from 0, in collection order: by rollout batch, then by task, episode and
step. The index stores episode lengths, not transitions.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.types import Array, Step


class GrowingColumns:
    """Growable int64 columns of equal length. Appending takes amortized constant time per row."""

    def __init__(self, num_columns: int) -> None:
        self._data = np.empty((num_columns, 16), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, *columns: Array | int) -> None:
        """Append one row of integers, or one row per element of the given columns."""
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


class ReplayError(ValueError):
    """Raised if requested rows are not in the replay buffer, or if appended data are invalid."""


class Locations(NamedTuple):
    """Where n rows are stored: rollout batch index, task b, episode e and step t, [n] each."""

    rounds: Array
    b: Array
    e: Array
    t: Array


class RowIndex:
    """Index that locates rows within rollout batches, which are numbered from 0 in collection order."""

    def __init__(self) -> None:
        self._first_rows = GrowingColumns(1)
        self._episodes = GrowingColumns(3)  # first row, b, e
        self.num_rows: int = 0

    def __len__(self) -> int:
        """Return the number of rollout batches."""
        return len(self._first_rows)

    def append(self, lengths: Array) -> None:
        """Index the rows of the next rollout batch, given its episode lengths [B, E], 0 for empty slots."""
        _require_lengths(lengths)
        b, e = np.nonzero(lengths)
        steps = lengths[b, e].astype(np.int64)
        self._first_rows.append(self.num_rows)
        self._episodes.append(self.num_rows + np.cumsum(steps) - steps, b, e)
        self.num_rows += int(steps.sum())

    def rows_of(self, number: int) -> range:
        """Return the range of a rollout batch's rows."""
        first_rows = self._first_rows[0]
        stop = self.num_rows if number + 1 == len(first_rows) else int(first_rows[number + 1])
        return range(int(first_rows[number]), stop)

    def round_numbers(self, rows: Array) -> Array:
        """Return the rollout batch index of each row, [...] int64."""
        return np.searchsorted(self._first_rows[0], rows, side="right") - 1

    def locate(self, rows: Array) -> Locations:
        """Return the locations of rows [n]."""
        self.require(rows)
        first_rows, b, e = (self._episodes[column] for column in range(3))
        episode = np.searchsorted(first_rows, rows, side="right") - 1
        return Locations(self.round_numbers(rows), b[episode], e[episode], rows - first_rows[episode])

    def require(self, rows: Array) -> None:
        """Raise ReplayError if any of the row indices [...] is not in the run."""
        if rows.size and not (rows.min() >= 0 and rows.max() < self.num_rows):
            raise ReplayError(
                f"got rows from {rows.min()} to {rows.max()}; the replay buffer has 0 to {self.num_rows - 1}. "
                "Append every rollout batch up to the iteration in which the rows were drawn"
            )


class _RowRanges:
    """A selection of rows in ascending order, stored as ranges."""

    def __init__(self) -> None:
        self._ranges = GrowingColumns(2)  # first row, and the number of selected rows before it
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, first_row: int, count: int) -> None:
        """Append the rows `first_row` ... `first_row + count - 1`, all after the existing ones."""
        first_rows, before = self._ranges[0], self._ranges[1]
        if not self._size or first_rows[-1] + self._size - before[-1] != first_row:
            self._ranges.append(first_row, self._size)
        self._size += count

    def count_below(self, row: int) -> int:
        """Return the number of selected rows before `row`."""
        first_rows, before = self._ranges[0], self._ranges[1]
        n = int(np.searchsorted(first_rows, row)) - 1
        if n < 0:
            return 0
        end = self._size if n + 1 == len(before) else int(before[n + 1])
        return min(int(before[n] + row - first_rows[n]), end)

    def at(self, positions: Array) -> Array:
        """Return the rows at `positions` [...] in the selection, [...] int64."""
        first_rows, before = self._ranges[0], self._ranges[1]
        if len(before) == 1:
            return positions + first_rows[0]
        n = np.searchsorted(before, positions, side="right") - 1
        return positions + (first_rows - before)[n]

    def between(self, start: int, stop: int) -> Array:
        """Return the rows at positions `start` ... `stop` - 1."""
        first_rows, before = self._ranges[0], self._ranges[1]
        counts = np.diff(np.clip(np.append(before, self._size), start, stop))
        return np.repeat(first_rows - before, counts) + np.arange(start, stop)


@dataclass(frozen=True)
class DrawableRows:
    """The rows of a task that can be drawn, oldest first."""

    ranges: _RowRanges
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def at(self, positions: Array) -> Array:
        """Return the rows at `positions` [...] int64, where 0 is the oldest row and len - 1 the newest."""
        if positions.size > len(self):
            # For many positions, a table of all rows is several times as fast as bisection.
            return self.ranges.between(self.start, self.stop)[positions]
        return self.ranges.at(positions + self.start)


class _Task:
    """All rows of a task, and its context rows by iteration."""

    def __init__(self) -> None:
        self.rows = _RowRanges()
        self.context = _RowRanges()
        self.collections = GrowingColumns(2)  # per iteration: first context row, number of context rows before it
        self._last: int | None = None

    def append(self, iteration: int, first_row: int, count: int, in_context: bool) -> None:
        self.rows.append(first_row, count)
        if not in_context:
            return
        if iteration != self._last:
            self.collections.append(first_row, len(self.context))
            self._last = iteration
        self.context.append(first_row, count)


@dataclass(frozen=True)
class ReplayView:
    """All tasks' replay buffers as they were when the run had `num_rows` rows."""

    tasks: Mapping[int, _Task]
    num_rows: int

    def rows(self, task_id: int, size: int) -> DrawableRows:
        """Return the newest `size` rows of a task, or all if there are fewer."""
        task = self.tasks.get(task_id, _NO_TASK)
        stop = task.rows.count_below(self.num_rows)
        return DrawableRows(task.rows, max(0, stop - size), stop)

    def context(self, task_id: int) -> DrawableRows:
        """Return a task's context rows from the last iteration that collected any, or from the initial fill."""
        task = self.tasks.get(task_id, _NO_TASK)
        latest = int(np.searchsorted(task.collections[0], self.num_rows)) - 1
        start = int(task.collections[1][latest]) if latest >= 0 else 0
        return DrawableRows(task.context, start, task.context.count_below(self.num_rows))


_NO_TASK = _Task()


class TaskIndex:
    """Append-only index of each task's rows, which can be viewed as of any iteration."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, _Task] = defaultdict(_Task)
        self._rounds = GrowingColumns(2)  # per rollout batch: its iteration, and the row index after its last

    def __len__(self) -> int:
        """Return the number of rollout batches."""
        return len(self._rounds)

    def append(self, iteration: int, task_ids: Sequence[int] | Array, lengths: Array, *, in_context: bool) -> None:
        """Append the next rollout batch, from which tasks may be inferred if `in_context`.

        The iteration is -1 for the initial fill. The lengths [B, E] are in steps, 0 for empty slots. Raises ReplayError
        if the last batch is from a later iteration, this one has no steps, or the shapes differ.
        """
        _require_lengths(lengths)
        if len(task_ids) != len(lengths):
            raise ReplayError(f"lengths have shape {lengths.shape} for {len(task_ids)} tasks; expected [B, E], B tasks")
        if len(self) and iteration < (last := int(self._rounds[0][-1])):
            raise ReplayError(
                f"got a rollout batch of iteration {iteration} after iteration {last}; append them in order"
            )
        first = int(self._rounds[1][-1]) if len(self) else 0
        for task_id, count in zip(task_ids, lengths.sum(axis=1, dtype=np.int64).tolist(), strict=True):
            if count:
                self._tasks[int(task_id)].append(iteration, first, count, in_context)
            first += count
        self._rounds.append(iteration, first)

    def as_of(self, iteration: int) -> ReplayView:
        """Return the buffers as of an iteration, including that iteration's rollout batches."""
        count = int(np.searchsorted(self._rounds[0], iteration, side="right"))
        return ReplayView(self._tasks, int(self._rounds[1][count - 1]) if count else 0)


def _require_lengths(lengths: Array) -> None:
    if lengths.ndim != 2 or not lengths.any() or lengths.min() < 0:
        least = lengths.min() if lengths.size else "none"
        raise ReplayError(
            f"a rollout batch has lengths of shape {lengths.shape}, minimum {least} and sum {lengths.sum()}; they must "
            "have the shape [B, E], must not be negative, and must add up to at least one step"
        )


class TrialBuffer:
    """Sequence of trials, oldest rollout batch first. A batch is read when one of its trials is drawn."""

    def __init__(self, counts: Sequence[int], read: Callable[[int], Trials]) -> None:
        """Create a buffer from each batch's number of trials, and a function that reads a batch given its index."""
        self._ends, self._read = [*accumulate(counts)], read

    def __len__(self) -> int:
        """Return the number of trials."""
        return self._ends[-1]

    def take(self, numbers: Array) -> list[tuple[Trials, int]]:
        """Return, for each trial index in `numbers` [n], the trials of its rollout batch and its index among them."""
        rounds = np.searchsorted(self._ends, numbers, side="right")
        begins = np.array([0, *self._ends])[rounds]
        return [(self._read(r), p) for r, p in zip(rounds.tolist(), (numbers - begins).tolist(), strict=True)]


@dataclass(frozen=True)
class TrialExperience:
    """Input to VariBAD's update: this iteration's step and the buffer of recent trials."""

    step: Step
    buffer: TrialBuffer
