"""Connects the replay buffer with the rounds that a run has stored."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from metaloom.flows.graph.outputs import SpanOutputs
from metaloom.pipeline.replay.buffer import ReplayBuffer
from metaloom.pipeline.replay.index import ReplayView, TaskIndex
from metaloom.pipeline.types import Array, Minibatch, Minibatches
from metaloom.storage import StageRef

BEFORE_ITERATIONS = -1
"""The iteration of what fills the replay buffer before the first one."""


class Collected(NamedTuple):
    """Whose episodes a round holds.

    Attributes:
        iteration: that collected it, or BEFORE_ITERATIONS.
        task_ids: [B], whose replay buffer the episodes of each task go into.
        in_context: tasks are inferred from it.
    """

    iteration: int
    task_ids: Array
    in_context: bool


class StoredReplay:
    """A run's rounds in order of collection and the replay buffer they make up, known as far as they were asked for.

    Which rows there are is a matter of lengths alone: of stored rounds no more is read until rows of them are drawn.

    Args:
        buffer: an empty one.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._tasks = TaskIndex()
        self._rounds: list[tuple[StageRef, Array]] = []
        self._next_iteration = 0

    def view(self, rounds: SpanOutputs, collected: Callable[[StageRef, int], Collected]) -> ReplayView:
        """Return what the last iteration of a span of rounds draws its rows from.

        Args:
            rounds: of which the lengths are read.
            collected: says of a round of B tasks whose it is.
        """
        self._count(rounds)
        for ref, lengths in self._rounds[len(self._tasks) :]:
            if ref.iteration > rounds.span.last:
                break
            iteration, task_ids, in_context = collected(ref, len(lengths))
            self._tasks.append(iteration, task_ids, lengths, in_context=in_context)
        return self._tasks.as_of(rounds.span.last)

    def minibatches(self, rounds: SpanOutputs, drawn: Minibatches) -> Iterator[Minibatch]:
        """Return the transitions of an iteration's gradient steps; of the rounds in the span, those drawn are read."""
        self._count(rounds)
        for _, lengths in self._rounds[len(self._buffer.rows) :]:
            self._buffer.append(lengths)
        return self._buffer.minibatches(drawn, lambda number: rounds.experience(self._rounds[number][0]))

    def _count(self, rounds: SpanOutputs) -> None:
        for iteration in range(self._next_iteration, rounds.span.last + 1):
            self._rounds += [(ref, rounds.lengths(ref)) for ref in rounds.refs(iteration)]
            self._next_iteration = iteration + 1
