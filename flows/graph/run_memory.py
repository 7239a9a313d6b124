"""A run's replay memory, brought up to any of its iterations."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from metaloom.flows.graph.iteration_stages import Load

from metaloom.flows.graph.replay_memory import ReplayMemory
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.replay.index import MemoryView
from metaloom.pipeline.types import Array, EpisodeBatch, Minibatch, Minibatches
from metaloom.storage import Run, StageRef
from metaloom.storage.read.transitions import stored_lengths


class CollectedRound(NamedTuple):
    """A round whose transitions are remembered: the stage that collected it, and whether tasks are inferred from it."""

    ref: StageRef
    in_context: bool


class RunMemory:
    """The rounds of a run in order of collection, known as far as they were asked for.

    Which rows there are is a matter of lengths alone. So of rounds that were stored before only those are read, until
    transitions of them are asked for.
    """

    def __init__(
        self,
        columns: TransitionColumns,
        rounds: Callable[[int], list[CollectedRound]],
        *,
        run: Run | None,
        by_task: bool,
        **options: Any,
    ) -> None:
        """A memory that knows no round yet.

        Args:
            columns: what a transition consists of.
            rounds: the rounds of an iteration.
            run: the run as it was stored before; None for a new one.
            by_task: whether every task of the fixed set has a memory of its own.
            options: of the ReplayMemory.
        """
        self._rounds = rounds
        self._run = run
        self._by_task = by_task
        self._next_iteration = 0
        self._load: Load = _nothing_to_load_from
        self._memory = ReplayMemory(self._read, columns, **options)

    def view(self, iteration: int, load: Load) -> MemoryView:
        """What an iteration draws its rows from; `load` brings the outputs of stages."""
        self._bring_up_to(iteration, load)
        return self._memory.index.as_of(iteration)

    def minibatches(self, iteration: int, chosen: Minibatches, load: Load) -> Iterator[Minibatch]:
        """The transitions of an iteration's gradient steps, one after the other."""
        self._bring_up_to(iteration, load)
        return self._memory.minibatches(chosen)

    def _bring_up_to(self, iteration: int, load: Load) -> None:
        self._load = load
        for i in range(self._next_iteration, iteration + 1):
            for collected in self._rounds(i):
                self._extend(collected)
            self._next_iteration = i + 1

    def _extend(self, collected: CollectedRound) -> None:
        ref, in_context = collected
        # Asked round by round: one that is computed again is not stored while later ones are.
        if self._run is not None and ref in self._stored:
            lengths = stored_lengths(self._run, ref)
            self._memory.extend_stored(ref, self._memory_ids(ref, len(lengths)), lengths, in_context=in_context)
        else:
            episodes = self._read(ref)
            self._memory.extend(ref, self._memory_ids(ref, len(episodes.lengths)), episodes, in_context=in_context)

    def _memory_ids(self, ref: StageRef, num_tasks: int) -> Array:
        """[B], whose memory the episodes of each task of a round belong to."""
        if not self._by_task:
            return np.zeros(num_tasks, np.int64)
        if ref.stage == "fill_memory":  # which is of all tasks in their order
            return np.arange(num_tasks)
        return self._load(StageRef(ref.iteration, "sample_tasks")).ids

    @cached_property
    def _stored(self) -> frozenset[StageRef]:
        return frozenset() if self._run is None else frozenset(self._run.refs())

    def _read(self, ref: StageRef) -> EpisodeBatch:
        return self._load(ref)


def _nothing_to_load_from(ref: StageRef) -> Any:
    raise AssertionError(f"{ref} is asked for before an iteration is")
