"""The transitions that an off-policy run learns from: the newest rows in memory, older ones read from the store."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metaloom.flows.graph.hot_window import HotWindow
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.replay.growing_columns import GrowingColumns
from metaloom.pipeline.replay.index import ReplayError, ReplayIndex, Round
from metaloom.pipeline.types import Array, EpisodeBatch, Minibatch, Minibatches, Transitions
from metaloom.storage import StageRef


@dataclass(frozen=True)
class _ColdRows:
    """Copies of rows older than the hot window: their ascending numbers [n], and [n, W]."""

    numbers: Array
    data: Array


class ReplayMemory:
    """Gathers minibatches of a run's transitions. Which rows are in memory changes the time it takes, never a bit.

    A round that is stored but was not seen (`extend_stored`) is read when a transition of it is first asked for. So a
    resumed run, or one iteration that is replayed, reads what it learns from and nothing else.

    Attributes:
        index: where the transitions lie; `index.as_of(iteration)` is what `sample_transitions` draws from.
    """

    def __init__(
        self,
        load: Callable[[StageRef], EpisodeBatch],
        columns: TransitionColumns,
        *,
        cache_bytes: int,
        max_rows: int,
        context_rewards: Callable[[Array], Array] | None = None,
    ) -> None:
        """A memory without transitions.

        Args:
            load: reads a stored batch.
            columns: what a transition consists of.
            cache_bytes: memory for transitions. Only a single gradient step whose rows do not fit exceeds it. The
                stored batch that is being read comes on top.
            max_rows: how many of the newest transitions can ever be drawn from; no memory is set aside for more.
            context_rewards: what a task is inferred from shows these rewards [..., C] in place of the stored ones.

        Raises:
            ReplayError: the cache is too small for two rows.
        """
        self.index = ReplayIndex()
        self._load = load
        self._columns = columns
        self._context_rewards = context_rewards
        cached = cache_bytes // columns.row_bytes
        if cached < 2:
            raise ReplayError(
                f"the replay memory may take {cache_bytes} bytes; required at least {2 * columns.row_bytes}, two "
                "transitions. Raise the limit: what does not fit is read from the store over and over"
            )
        # Where not all rows fit, those that are read from the store get half: twice the room for them halves the reads.
        hot = max_rows if max_rows <= 0.75 * cached else cached // 2
        self._window = HotWindow(hot, columns.width)
        self._cold_rows = cached - hot
        self._was_read = GrowingColumns(1)  # per round: 1 if what of it lies in the window is there
        self._all_read_from = 0  # the first row after which every round was read

    def extend(
        self, ref: StageRef, task_ids: Sequence[int] | Array, episodes: EpisodeBatch, *, in_context: bool
    ) -> None:
        """The next round of collection, in memory. Arguments and errors as in `ReplayIndex.append`."""
        self._append(ref, task_ids, episodes.lengths, in_context, was_read=True)
        self._keep(len(self.index.rounds) - 1, episodes)

    def extend_stored(
        self, ref: StageRef, task_ids: Sequence[int] | Array, lengths: Array, *, in_context: bool
    ) -> None:
        """The next round of collection, of which only the `lengths` [B, E] were read from the store."""
        self._append(ref, task_ids, lengths, in_context, was_read=False)
        self._all_read_from = self.index.num_rows

    def minibatches(self, chosen: Minibatches) -> Iterator[Minibatch]:
        """The transitions of one gradient step after the other. The memory must not be extended meanwhile.

        Raises:
            ReplayError: a row is not in the memory, a stored batch is not what it was said to be, or it was extended.
        """
        rows, N = chosen.rows[: chosen.num_updates], chosen.rows.shape[2]
        if chosen.context_rows is not None:
            rows = np.concatenate([rows, chosen.context_rows[: chosen.num_updates]], axis=2)
        num_rows = self.index.num_rows
        if rows.size and not (rows.min() >= 0 and rows.max() < num_rows):
            raise ReplayError(
                f"minibatches hold the rows {rows.min()} to {rows.max()}; the memory has 0 to {num_rows - 1}. "
                "Extend it with every round up to the iteration of the minibatches"
            )
        self._read_window(rows)
        is_old = rows < self._window.start
        for block in blocks_within(is_old.sum(axis=(1, 2)), self._cold_rows):
            cold = self._read_cold(rows[block][is_old[block]])
            for step in rows[block]:
                if self.index.num_rows != num_rows:
                    raise ReplayError("the replay memory was extended while minibatches were taken from it")
                yield self._minibatch(self._gather(step, cold), N)

    def _append(
        self, ref: StageRef, task_ids: Sequence[int] | Array, lengths: Array, in_context: bool, *, was_read: bool
    ) -> None:
        self.index.append(Round(ref.iteration, ref.stage, ref.step), task_ids, lengths, in_context=in_context)
        self._was_read.append(int(was_read))
        self._window.advance(self.index.num_rows)

    def _minibatch(self, gathered: Array, N: int) -> Minibatch:
        transitions = self._columns.unpack(gathered[:, :N])
        if gathered.shape[1] == N:
            return Minibatch(transitions)
        return Minibatch(transitions, self._as_context(self._columns.unpack(gathered[:, N:])))

    def _as_context(self, transitions: Transitions) -> Transitions:
        if self._context_rewards is None:
            return transitions
        return replace(transitions, rewards=self._context_rewards(transitions.rewards))

    def _gather(self, rows: Array, cold: _ColdRows) -> Array:
        """[K, n, W] copies of rows [K, n]."""
        flat = rows.ravel()
        gathered = self._window.gather(flat)
        if len(cold.numbers):
            is_old = flat < self._window.start
            gathered[is_old] = cold.data[np.searchsorted(cold.numbers, flat[is_old])]
        return gathered.reshape(*rows.shape, -1)

    def _read_window(self, rows: Array) -> None:
        """Read the rounds of those rows that have a place in the window but are not there yet."""
        if self._window.start >= self._all_read_from:
            return
        unread = rows[(rows >= self._window.start) & (rows < self._all_read_from)]
        asked = np.zeros(len(self.index.rounds), bool)
        asked[self.index.round_numbers(unread)] = True
        for number in np.flatnonzero(asked & (self._was_read[0] == 0)).tolist():
            self._keep(number, self._read(number))
            self._was_read[0][number] = 1

    def _keep(self, number: int, episodes: EpisodeBatch) -> None:
        """Put what of a round has a place in the window there."""
        first = self.index.rows_of(number).start
        gone = max(0, self._window.start - first)
        b, e, t = (axis[gone:] for axis in np.nonzero(episodes.mask))
        self._window.write(first + gone, self._columns.pack(episodes, b, e, t))

    def _read_cold(self, rows: Array) -> _ColdRows:
        """Copies of rows [n], every stored batch read once and only what is needed of it kept."""
        numbers = np.unique(rows)
        data = np.empty((len(numbers), self._columns.width), np.float32)
        places = self.index.locate(numbers)
        rounds, firsts = np.unique(places.rounds, return_index=True)
        for number, first, stop in zip(rounds.tolist(), firsts, np.append(firsts, len(numbers))[1:], strict=True):
            data[first:stop] = self._columns.pack(self._read(number), *(axis[first:stop] for axis in places[1:]))
        return _ColdRows(numbers, data)

    def _read(self, number: int) -> EpisodeBatch:
        ref = StageRef(*self.index.rounds[number])
        episodes = self._load(ref)
        if episodes.num_steps != (known := len(self.index.rows_of(number))):
            raise ReplayError(
                f"{ref} holds {episodes.num_steps} steps, but the memory was extended with {known} of it; "
                "required the batch that it was extended with. `metaloom verify` checks what is stored"
            )
        return episodes


def blocks_within(counts: Array, limit: int) -> Iterator[slice]:
    """Split places into consecutive blocks whose `counts` [n] sum to at most `limit`, or that are of one place."""
    first, total = 0, 0
    for place, count in enumerate(counts.tolist()):
        if place > first and total + count > limit:
            yield slice(first, place)
            first, total = place, 0
        total += count
    if first < len(counts):
        yield slice(first, len(counts))
