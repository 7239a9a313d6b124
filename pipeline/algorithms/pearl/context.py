"""Context that a task is inferred from: transitions of the episodes that were collected of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, Transitions


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
