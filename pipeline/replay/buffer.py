"""Replay buffer of an off-policy run: the newest transitions are in memory; older ones are read when drawn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.replay.index import GrowingColumns, ReplayError, RowIndex
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, Minibatch, Minibatches, Transitions


@dataclass(frozen=True)
class TransitionColumns:
    """Column layout of a transition matrix [n, W]: observation, action, reward, next observation, terminated.

    A discrete action has `action_size` 0; its index takes one column, in which float32 is exact below 2**24.
    """

    observation_size: int
    action_size: int

    @property
    def width(self) -> int:
        return 2 * self.observation_size + max(self.action_size, 1) + 2

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(np.float32).itemsize

    def pack(self, episodes: EpisodeBatch, b: Array, e: Array, t: Array) -> Array:
        """Pack n steps into rows [n, W] float32, given the task b, episode e and step t of each."""
        rows = np.empty((len(t), self.width), np.float32)
        O, end = self.observation_size, self.width - 1
        rows[:, :O] = episodes.observations[b, e, t]
        rows[:, O : end - O - 1] = episodes.actions[b, e, t].reshape(len(t), -1)
        rows[:, end - O - 1] = episodes.rewards[b, e, t]
        rows[:, end - O : end] = episodes.observations[b, e, t + 1]
        rows[:, end] = episodes.terminated[b, e] & (t == episodes.lengths[b, e] - 1)
        return rows

    def unpack(self, rows: Array) -> Transitions:
        """Unpack rows [..., W] into transitions whose fields are contiguous."""
        O, end = self.observation_size, self.width - 1
        actions = rows[..., O : end - O - 1]
        return Transitions(
            observations=np.ascontiguousarray(rows[..., :O]),
            actions=np.ascontiguousarray(actions) if self.action_size else actions[..., 0].astype(np.int64),
            rewards=np.ascontiguousarray(rows[..., end - O - 1]),
            next_observations=np.ascontiguousarray(rows[..., end - O : end]),
            terminated=rows[..., end] != 0,
        )


@dataclass(frozen=True)
class ContextRounds:
    """The rollout batches from which an adaptation step infers B tasks."""

    rounds: Sequence[EpisodeBatch]
    # Run seed, iteration and adaptation step, which seed the sampling of transitions; None after training.
    position: tuple[int, int, int] | None = None

    @property
    def num_episodes(self) -> int:
        """Number of episodes per task."""
        return sum(episodes.rewards.shape[1] for episodes in self.rounds)

    def transitions(self, num_transitions: int) -> Iterator[Transitions]:
        """Yield the transitions [1, C] of each task: a random sample in training, all of them afterwards."""
        first = self.rounds[0]
        columns = TransitionColumns(first.observations.shape[-1], first.actions.shape[-1])
        for b in range(len(first.rewards)):
            real = [np.nonzero(episodes.mask[b]) for episodes in self.rounds]
            packed = (columns.pack(of, np.full_like(e, b), e, t) for of, (e, t) in zip(self.rounds, real, strict=True))
            seen = np.concatenate([*packed])
            if self.position is None:
                yield columns.unpack(seen[None])
                continue
            rng = generator(self.position[0], "context", *self.position[1:], b)
            rows = rng.choice(np.arange(len(seen)), num_transitions, replace=len(seen) < num_transitions)
            yield columns.unpack(seen[rows][None])


ReadRound = Callable[[int], EpisodeBatch]
"""Function that reads the episodes of a rollout batch, given its index in collection order."""


class ReplayBuffer:
    """Buffer that gathers minibatches of a run's transitions. Caching affects speed but not results.

    A rollout batch is read when one of its rows is first drawn, so resumed runs and replays read only what they need.
    """

    def __init__(self, columns: TransitionColumns, *, cache_bytes: int, max_rows: int) -> None:
        """Create an empty buffer, sized for draws from the newest `max_rows` transitions.

        Transitions take at most `cache_bytes` in memory, unless the rows of a single gradient step need more. The batch
        being read is not included. Raises ReplayError if two transitions do not fit.
        """
        self.rows: RowIndex = RowIndex()
        self._columns = columns
        fitting = cache_bytes // columns.row_bytes
        if fitting < 2:
            raise ReplayError(
                f"the replay buffer is limited to {cache_bytes} bytes; it needs at least {2 * columns.row_bytes}, for "
                "two transitions. Raise the limit, since transitions beyond it are read from the store repeatedly"
            )
        # If not all rows fit, half of the memory holds old rows: doubling it halves the reads.
        newest = max_rows if max_rows <= 0.75 * fitting else fitting // 2
        self._most_old_rows = fitting - newest
        # Row r is at index r modulo the size. Pages are allocated when first written.
        self._newest = np.empty((newest, columns.width), np.float32)
        self._is_read = GrowingColumns(1)  # per rollout batch: 1 if its newest rows are in memory

    def append(self, lengths: Array) -> None:
        """Append the next rollout batch, given its episode lengths [B, E]. Its episodes are read on demand."""
        self.rows.append(lengths)
        self._is_read.append(0)

    def minibatches(self, drawn: Minibatches, read: ReadRound) -> Iterator[Minibatch]:
        """Yield one minibatch per gradient step. The buffer must not grow in the meantime.

        Raises ReplayError if a row is not in the buffer, a batch does not have the appended length, or the buffer grew.
        """
        rows, N = drawn.rows[: drawn.num_updates], drawn.rows.shape[2]
        if drawn.context_rows is not None:
            rows = np.concatenate([rows, drawn.context_rows[: drawn.num_updates]], axis=2)
        self.rows.require(rows)
        num_rows = self.rows.num_rows
        self._read_newest(rows, read)
        is_old = rows < self._first_newest
        for block in blocks_within(is_old.sum(axis=(1, 2)), self._most_old_rows):
            numbers, old = self._read_old(rows[block][is_old[block]], read)
            for step in rows[block]:
                if self.rows.num_rows != num_rows:
                    raise ReplayError("the replay buffer grew while minibatches were drawn from it")
                gathered = self._gather(step, numbers, old)
                context = self._columns.unpack(gathered[:, N:]) if gathered.shape[1] > N else None
                yield Minibatch(self._columns.unpack(gathered[:, :N]), context)

    @property
    def _first_newest(self) -> int:
        return max(0, self.rows.num_rows - len(self._newest))

    def _gather(self, rows: Array, numbers: Array, old: Array) -> Array:
        """Return the data [K, n, W] of rows [K, n], older ones from `old`, whose sorted row indices are `numbers`."""
        flat = rows.ravel()
        gathered = self._newest.take(flat % len(self._newest), axis=0)
        if len(numbers):
            is_old = flat < self._first_newest
            gathered[is_old] = old[np.searchsorted(numbers, flat[is_old])]
        return gathered.reshape(*rows.shape, -1)

    def _read_newest(self, rows: Array, read: ReadRound) -> None:
        """Read the rollout batches that contain the requested recent rows and are not in memory yet."""
        oldest = int(self.rows.round_numbers(np.array(self._first_newest)))
        unread = oldest + np.flatnonzero(self._is_read[0][oldest:] == 0)
        if not len(unread):
            return
        # Most rows are already in memory and need no lookup.
        first = max(self._first_newest, self.rows.rows_of(int(unread[0])).start)
        is_drawn = np.zeros(len(self.rows), bool)
        is_drawn[self.rows.round_numbers(rows[rows >= first])] = True
        for number in unread[is_drawn[unread]].tolist():
            episodes, kept = self._read(number, read), self.rows.rows_of(number)
            start = max(kept.start, self._first_newest)
            b, e, t = (axis[start - kept.start :] for axis in np.nonzero(episodes.mask))
            self._newest[np.arange(start, kept.stop) % len(self._newest)] = self._columns.pack(episodes, b, e, t)
            self._is_read[0][number] = 1

    def _read_old(self, rows: Array, read: ReadRound) -> tuple[Array, Array]:
        """Return the sorted unique row indices [n] and their data [n, W]. Each batch is read once and not cached."""
        numbers = np.unique(rows)
        data = np.empty((len(numbers), self._columns.width), np.float32)
        found = self.rows.locate(numbers)
        rounds, firsts = np.unique(found.rounds, return_index=True)
        for number, first, stop in zip(rounds.tolist(), firsts, np.append(firsts, len(numbers))[1:], strict=True):
            data[first:stop] = self._columns.pack(self._read(number, read), *(axis[first:stop] for axis in found[1:]))
        return numbers, data

    def _read(self, number: int, read: ReadRound) -> EpisodeBatch:
        episodes = read(number)
        if episodes.num_steps != (known := len(self.rows.rows_of(number))):
            raise ReplayError(
                f"rollout batch {number} holds {episodes.num_steps} steps, but was appended to the replay buffer with "
                f"{known}; it must be the batch that was appended. `metaloom verify` checks what is stored"
            )
        return episodes


def blocks_within(counts: Array, limit: int) -> Iterator[slice]:
    """Yield consecutive slices of `counts` [n], each with a sum of at most `limit` or with a single larger count."""
    first, total = 0, 0
    for n, count in enumerate(counts.tolist()):
        if n > first and total + count > limit:
            yield slice(first, n)
            first, total = n, 0
        total += count
    if first < len(counts):
        yield slice(first, len(counts))
