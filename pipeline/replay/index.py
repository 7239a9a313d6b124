"""Where the transitions of an off-policy run lie: which rows a task has, and which stored episode a row is from.

Rows are numbered from 0 in the order in which a run collects its real steps: round by round, and within a round by
task, episode and step. A round is one stored batch of complete episodes. Nothing here holds a transition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.replay.growing_columns import GrowingColumns
from metaloom.pipeline.types import Array


class ReplayError(ValueError):
    """Transitions are asked for that a replay memory does not have, or it is told of impossible ones."""


class Round(NamedTuple):
    """The stored batch that a stage collected: its iteration, the stage's name, and the step within the iteration."""

    iteration: int
    stage: str
    step: int


class Places(NamedTuple):
    """Where n rows lie: the number of the round, and in its batch task place b, episode e and step t: [n] each."""

    rounds: Array
    b: Array
    e: Array
    t: Array


class RowSpans:
    """An ascending choice of rows, kept as spans of consecutive ones."""

    def __init__(self) -> None:
        self._spans = GrowingColumns(2)  # first row, and how many rows come before it
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, first_row: int, count: int) -> None:
        """The rows `first_row` ... `first_row + count - 1`, all after those that are there."""
        first_rows, before = self._spans[0], self._spans[1]
        if not self._size or first_rows[-1] + self._size - before[-1] != first_row:
            self._spans.append(first_row, self._size)
        self._size += count

    def count_below(self, row: int) -> int:
        """How many rows come before `row`."""
        first_rows, before = self._spans[0], self._spans[1]
        span = int(np.searchsorted(first_rows, row)) - 1
        if span < 0:
            return 0
        end = self._size if span + 1 == len(before) else int(before[span + 1])
        return min(int(before[span] + row - first_rows[span]), end)

    def at(self, positions: Array) -> Array:
        """The rows at `positions` [...] of the ascending choice: [...] int64."""
        first_rows, before = self._spans[0], self._spans[1]
        if len(before) == 1:
            return positions + first_rows[0]
        span = np.searchsorted(before, positions, side="right") - 1
        return positions + (first_rows - before)[span]

    def between(self, start: int, stop: int) -> Array:
        """The rows at positions `start` ... `stop` - 1."""
        first_rows, before = self._spans[0], self._spans[1]
        counts = np.diff(np.clip(np.append(before, self._size), start, stop))
        return np.repeat(first_rows - before, counts) + np.arange(start, stop)


@dataclass(frozen=True)
class TaskRows:
    """The rows of a task's memory, oldest first."""

    spans: RowSpans
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def at(self, positions: Array) -> Array:
        """The rows at `positions` [...], 0 to len - 1, 0 being the oldest: [...] int64."""
        if positions.size > len(self):
            # Many positions are looked up several times as fast in a table of all rows as by bisection.
            return self.spans.between(self.start, self.stop)[positions]
        return self.spans.at(positions + self.start)


class _TaskBook:
    """What an index keeps for a task: its rows, and its rows of context with the phases of collection they are from."""

    def __init__(self) -> None:
        self.rows = RowSpans()
        self.context = RowSpans()
        self.phases = GrowingColumns(2)  # first row of a phase, and how many rows of context come before it
        self._phase: tuple[int, str] | None = None

    def append(self, round: Round, first_row: int, count: int, in_context: bool) -> None:
        self.rows.append(first_row, count)
        if not in_context:
            return
        if (phase := (round.iteration, round.stage)) != self._phase:
            self.phases.append(first_row, len(self.context))
            self._phase = phase
        self.context.append(first_row, count)


_NO_ROWS = TaskRows(RowSpans(), 0, 0)


@dataclass(frozen=True)
class MemoryView:
    """The memories of all tasks as they were when a run had `num_rows` rows."""

    books: dict[int, _TaskBook]
    num_rows: int

    def memory(self, task_id: int, memory_size: int) -> TaskRows:
        """The newest `memory_size` rows of a task, fewer while it has fewer."""
        if (book := self.books.get(task_id)) is None:
            return _NO_ROWS
        stop = book.rows.count_below(self.num_rows)
        return TaskRows(book.rows, max(0, stop - memory_size), stop)

    def context(self, task_id: int) -> TaskRows:
        """The rows that a task is inferred from: those of its latest phase of collection that were flagged as context.

        A phase is all rounds of one stage in one iteration. So the fill of iteration 0 counts until the task is first
        picked, afterwards what was collected when it was last picked.
        """
        book = self.books.get(task_id)
        if book is None or not (phase := int(np.searchsorted(book.phases[0], self.num_rows))):
            return _NO_ROWS
        return TaskRows(book.context, int(book.phases[1][phase - 1]), book.context.count_below(self.num_rows))


class ReplayIndex:
    """Bookkeeping of a run's transitions. It only grows, and older states of it stay readable.

    Attributes:
        rounds: the rounds, in order of collection.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self._round_starts = GrowingColumns(2)  # first row, iteration
        self._episodes = GrowingColumns(3)  # first row, b, e
        self._books: dict[int, _TaskBook] = {}
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Transitions of the whole run."""
        return self._num_rows

    def append(self, round: Round, task_ids: Sequence[int] | Array, lengths: Array, *, in_context: bool) -> range:
        """The next round of collection.

        Args:
            round: it comes after all that are there.
            task_ids: [B], whose memory each task's episodes belong to.
            lengths: [B, E] steps per episode, 0 where there is none.
            in_context: whether tasks are inferred from it.

        Returns:
            The rows of the round.

        Raises:
            ReplayError: the round is known or too old, or has no steps, or the shapes do not fit.
        """
        self._check(round, task_ids, lengths)
        first = self._num_rows
        b, e = np.nonzero(lengths)
        steps = lengths[b, e].astype(np.int64)
        self._num_rows += int(steps.sum())
        self._round_starts.append(first, round.iteration)
        self._episodes.append(first + np.cumsum(steps) - steps, b, e)
        self.rounds.append(round)
        for task_id, count in zip(task_ids, lengths.sum(axis=1, dtype=np.int64).tolist(), strict=True):
            if count:
                self._book(int(task_id)).append(round, first, count, in_context)
            first += count
        return range(first - int(steps.sum()), first)

    def as_of(self, iteration: int) -> MemoryView:
        """The memories as iteration `iteration` learns from them: with its own rounds and all before."""
        starts, iterations = self._round_starts[0], self._round_starts[1]
        number = int(np.searchsorted(iterations, iteration, side="right"))
        return MemoryView(self._books, self._num_rows if number == len(starts) else int(starts[number]))

    def round_numbers(self, rows: Array) -> Array:
        """[...] int64, the places in `rounds` of the rounds that rows [...] are from."""
        return np.searchsorted(self._round_starts[0], rows, side="right") - 1

    def rows_of(self, number: int) -> range:
        """The rows of a round, given by its place in `rounds`."""
        starts = self._round_starts[0]
        stop = self._num_rows if number + 1 == len(starts) else int(starts[number + 1])
        return range(int(starts[number]), stop)

    def locate(self, rows: Array) -> Places:
        """Where rows [n] lie in the stored batches.

        Raises:
            ReplayError: one of them is not a row of the run.
        """
        if rows.size and not (rows.min() >= 0 and rows.max() < self._num_rows):
            raise ReplayError(f"rows are from {rows.min()} to {rows.max()}; required 0 to {self._num_rows - 1}")
        first_rows, b, e = (self._episodes[column] for column in range(3))
        episode = np.searchsorted(first_rows, rows, side="right") - 1
        return Places(self.round_numbers(rows), b[episode], e[episode], rows - first_rows[episode])

    def _check(self, round: Round, task_ids: Sequence[int] | Array, lengths: Array) -> None:
        if lengths.ndim != 2 or len(task_ids) != len(lengths):
            raise ReplayError(
                f"{round}: lengths have shape {lengths.shape} for {len(task_ids)} tasks; required [B, E], B of them"
            )
        if not lengths.size or lengths.min() < 0 or not lengths.any():
            raise ReplayError(f"{round}: its episodes have no steps, or fewer than none; required at least one step")
        if self.rounds and self._is_past(round):
            raise ReplayError(
                f"{round} comes after {self.rounds[-1]}; rounds are appended once, in order of collection"
            )

    def _is_past(self, round: Round) -> bool:
        current = self.rounds[-1].iteration
        if round.iteration != current:
            return round.iteration < current
        return round in self.rounds[int(np.searchsorted(self._round_starts[1], current)) :]

    def _book(self, task_id: int) -> _TaskBook:
        if task_id not in self._books:
            self._books[task_id] = _TaskBook()
        return self._books[task_id]
