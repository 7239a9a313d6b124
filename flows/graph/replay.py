"""Connects the replay buffer with the rounds that a run has stored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaloom.pipeline.replay.buffer import ReplayBuffer
from metaloom.pipeline.replay.index import ReplayView, TaskIndex
from metaloom.pipeline.types import Array, EpisodeBatch, Minibatch, Minibatches
from metaloom.storage import Span, StageRef

BEFORE_ITERATIONS = -1
"""The iteration of what fills the replay buffer before the first one."""


@dataclass(frozen=True)
class SpanOutputs:
    """The outputs of a span, of which a stage reads what it uses and nothing else.

    Attributes:
        span: the outputs.
        order: the stages of an iteration.
        load: reads a whole output.
        lengths: reads how many steps each episode of a batch has: [B, E].
        experience: reads a batch of episodes without behavior and reward terms.
    """

    span: Span
    order: Callable[[int], Sequence[StageRef]]
    load: Callable[[StageRef], Any]
    lengths: Callable[[StageRef], Array]
    experience: Callable[[StageRef], EpisodeBatch]

    def refs(self, iteration: int) -> list[StageRef]:
        """Return the outputs of an iteration."""
        return self.span.of(self.order(iteration))

    def num_steps(self, iteration: int) -> int:
        """Return the real steps of an iteration's episodes, without what filled the replay buffer before it."""
        return sum(int(self.lengths(ref).sum()) for ref in self.refs(iteration) if ref.stage != "fill_memory")


class StoredReplay:
    """A run's rounds in order of collection and the replay buffer they make up, known as far as they were asked for.

    Which rows there are is a matter of lengths alone: of stored rounds no more is read until rows of them are drawn.

    Args:
        buffer: an empty one.
        in_context: whether tasks are inferred from a round.
    """

    def __init__(self, buffer: ReplayBuffer, in_context: Callable[[StageRef], bool]) -> None:
        self._buffer = buffer
        self._in_context = in_context
        self._tasks = TaskIndex()
        self._rounds: list[tuple[StageRef, Array]] = []
        self._next_iteration = 0

    def view(self, rounds: SpanOutputs, tasks: SpanOutputs | None) -> ReplayView:
        """Return what the last iteration of a span of rounds draws its rows from.

        Args:
            rounds: fill_memory and collect_rollouts, of which the lengths are read.
            tasks: sample_tasks, where every task of a fixed set has a replay buffer of its own.
        """
        self._count(rounds)
        ids: dict[int, Array] = {}
        for ref, lengths in self._rounds[len(self._tasks) :]:
            i = ref.iteration
            if i > rounds.span.last:
                break
            if tasks is None:
                self._append(ref, np.zeros(len(lengths), np.int64), lengths)
            elif ref.stage == "fill_memory":  # which is of all tasks in their order
                self._append(ref, np.arange(len(lengths)), lengths)
            else:
                ids |= {} if i in ids else {i: tasks.load(StageRef(i, "sample_tasks")).ids}
                self._append(ref, ids[i], lengths)
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

    def _append(self, ref: StageRef, task_ids: Array, lengths: Array) -> None:
        iteration = BEFORE_ITERATIONS if ref.stage == "fill_memory" else ref.iteration
        self._tasks.append(iteration, task_ids, lengths, in_context=self._in_context(ref))
