"""Locations, on workers, of the batches that this process has as a whole."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Future

from metaloom.flows.rollouts.workers import SamplerSpec


@dataclass(frozen=True)
class Piece:
    """Consecutive tasks of a batch that workers hold.

    Attributes:
        future: Future of a value that contains the piece.
        path: Attributes and indices that lead from the value to the piece.
        start, stop: Range of its tasks in the batch.
    """

    future: Future[Any]
    path: tuple[str | int, ...]
    start: int
    stop: int


class Places:
    """Pieces of the current iteration's batches.

    Attributes:
        wanted: Returns True if workers should keep what is sampled with a spec.
    """

    def __init__(self) -> None:
        self.wanted: Callable[[SamplerSpec], bool] = lambda spec: False
        self._pieces: dict[int, tuple[weakref.ref[Any], tuple[Piece, ...]]] = {}

    def remember(self, batch: object, pieces: Iterable[Piece]) -> None:
        """Note that workers hold all tasks of a batch."""
        key = id(batch)
        self._pieces[key] = weakref.ref(batch, lambda _: self._pieces.pop(key, None)), tuple(pieces)

    def of(self, batch: object) -> Sequence[Piece]:
        """Return the pieces of a batch, in order; nothing where workers hold none."""
        of, pieces = self._pieces.get(id(batch), (None, ()))
        # Another batch may have come to where a forgotten one was; and workers may have gone with their scheduler.
        clients = [piece.future.client for piece in pieces]
        there = of is not None and of() is batch and all(c is not None and c.status != "closed" for c in clients)
        return pieces if there else ()

    def forget(self) -> None:
        """Make workers drop all batches."""
        self._pieces.clear()
