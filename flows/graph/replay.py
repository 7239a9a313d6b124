"""Connects the replay buffer with the stored rollout batches of a run."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from metaloom.flows.graph.outputs import SpanOutputs
from metaloom.pipeline.replay.buffer import ReplayBuffer
from metaloom.pipeline.replay.index import ReplayView, TaskIndex
from metaloom.pipeline.types import Array, Minibatch, Minibatches
from metaloom.storage import StageRef

BEFORE_ITERATIONS = -1
"""Iteration number of the replay buffer's initial fill."""


class Collected(NamedTuple):
    """Origin and use of a rollout batch.

    Attributes:
        iteration: Iteration that collected it, or BEFORE_ITERATIONS.
        task_ids: Replay buffer for the episodes of each task, [B].
        in_context: True if tasks are inferred from it.
    """

    iteration: int
    task_ids: Array
    in_context: bool


class StoredReplay:
    """A run's rollout batches in order of collection and the replay buffer they make up, extended on demand.

    Row numbers follow from episode lengths alone: nothing else of stored batches is read until their rows are drawn.

    Args:
        buffer: Empty replay buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._tasks = TaskIndex()
        self._rounds: list[tuple[StageRef, Array]] = []
        self._next_iteration = 0

    def view(self, rounds: SpanOutputs, collected: Callable[[StageRef, int], Collected]) -> ReplayView:
        """Return the view from which the last iteration of a span of rollout batches draws its rows.

        Args:
            rounds: Span of rollout batches; only lengths are read.
            collected: Returns the origin of a rollout batch of B tasks.
        """
        self._count(rounds)
        for ref, lengths in self._rounds[len(self._tasks) :]:
            if ref.iteration > rounds.span.last:
                break
            iteration, task_ids, in_context = collected(ref, len(lengths))
            self._tasks.append(iteration, task_ids, lengths, in_context=in_context)
        return self._tasks.as_of(rounds.span.last)

    def minibatches(self, rounds: SpanOutputs, drawn: Minibatches) -> Iterator[Minibatch]:
        """Yield the transitions of an iteration's gradient steps. Of the span's batches, only drawn ones are read."""
        self._count(rounds)
        for _, lengths in self._rounds[len(self._buffer.rows) :]:
            self._buffer.append(lengths)
        return self._buffer.minibatches(drawn, lambda number: rounds.experience(self._rounds[number][0]))

    def _count(self, rounds: SpanOutputs) -> None:
        for iteration in range(self._next_iteration, rounds.span.last + 1):
            self._rounds += [(ref, rounds.lengths(ref)) for ref in rounds.refs(iteration)]
            self._next_iteration = iteration + 1
