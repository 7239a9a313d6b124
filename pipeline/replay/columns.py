"""Transitions as rows of one float32 matrix, so that any of them are gathered at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, Transitions


@dataclass(frozen=True)
class TransitionColumns:
    """The columns of such a matrix: observation, action, reward, next observation, terminated.

    Attributes:
        observation_size: O.
        action_size: A; 0 for discrete actions, whose number takes one column. Float32 holds it exactly below 2**24.
    """

    observation_size: int
    action_size: int

    @property
    def width(self) -> int:
        """Number of columns W."""
        return 2 * self.observation_size + max(self.action_size, 1) + 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(np.float32).itemsize

    def pack(self, episodes: EpisodeBatch, b: Array, e: Array, t: Array) -> Array:
        """Copy the steps t [n] of the episodes e [n] of the tasks b [n] into rows: [n, W] float32."""
        rows = np.empty((len(t), self.width), np.float32)
        O, end = self.observation_size, self.width - 1
        rows[:, :O] = episodes.observations[b, e, t]
        rows[:, O : end - O - 1] = episodes.actions[b, e, t].reshape(len(t), -1)
        rows[:, end - O - 1] = episodes.rewards[b, e, t]
        rows[:, end - O : end] = episodes.observations[b, e, t + 1]
        rows[:, end] = episodes.terminated[b, e] & (t == episodes.lengths[b, e] - 1)
        return rows

    def unpack(self, rows: Array) -> Transitions:
        """Return the transitions in rows [..., W], each field contiguous."""
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
    """The rounds of episodes that an adaptation step infers tasks from.

    Attributes:
        rounds: of the same B tasks.
        position: run seed, iteration and adaptation step, which decide the transitions that are drawn of them.
    """

    rounds: Sequence[EpisodeBatch]
    position: tuple[int, int, int]

    def drawn(self, num_transitions: int) -> Iterator[Transitions]:
        """Draw [1, C] transitions of every task in turn, none twice where there are as many."""
        run_seed, *place = self.position
        for b, (columns, seen) in enumerate(_by_task(self.rounds)):
            rng = generator(run_seed, "context", *place, b)
            rows = rng.choice(np.arange(len(seen)), num_transitions, replace=len(seen) < num_transitions)
            yield columns.unpack(seen[rows][None])


def all_transitions(rounds: Sequence[EpisodeBatch]) -> Iterator[Transitions]:
    """All transitions [1, n] of every task in turn; tasks may differ in how many there are."""
    for columns, seen in _by_task(rounds):
        yield columns.unpack(seen[None])


def _by_task(rounds: Sequence[EpisodeBatch]) -> Iterator[tuple[TransitionColumns, Array]]:
    """The real steps of every task, [n, W]."""
    first = rounds[0]
    columns = TransitionColumns(first.observations.shape[-1], first.actions.shape[-1])
    for b in range(len(first.rewards)):
        real = [np.nonzero(episodes.mask[b]) for episodes in rounds]
        packed = [columns.pack(of, np.full_like(e, b), e, t) for of, (e, t) in zip(rounds, real, strict=True)]
        yield columns, np.concatenate(packed)
