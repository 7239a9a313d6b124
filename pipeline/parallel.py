"""Maps over chunks of tasks whose results may stay where they were computed.

Any ParallelMap computes the same in the same order. One that keeps results leaves them with the workers that hold the
tasks' batches, so that only what is small goes to them and comes back.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from metaloom.pipeline.types import Array, ParallelMap

T = TypeVar("T")


class OfTasks(Protocol):
    """A batch whose leading axis is tasks."""

    def slice(self, start: int, stop: int, /) -> Any:
        """Return the tasks start ... stop - 1."""
        ...


TaskBatches = Sequence[OfTasks | Array]


class KeepingMap(ABC):
    """A ParallelMap that computes on workers where it can.

    A kept result represents the actual one: it has the same length, and is an item of later calls.
    """

    @abstractmethod
    def __call__(self, work: Callable[..., Any], *items: Iterable[Any]) -> Iterable[Any]:
        """Return the results in the order of the items."""

    @abstractmethod
    def keep(self, work: Callable[[Any], T], items: Sequence[Any]) -> Sequence[T]:
        """Map as a call does; the results stay where the items are."""

    @abstractmethod
    def keep_tasks(self, work: Callable[..., T], bounds: Sequence[slice], **batches: TaskBatches) -> Sequence[T]:
        """Apply the function of this name."""

    @abstractmethod
    def join_tasks(self, work: Callable[..., T], tasks_together: int, **batches: TaskBatches) -> T:
        """Apply the function of this name."""


def keep(parallel: ParallelMap, work: Callable[[Any], T], items: Sequence[Any]) -> Sequence[T]:
    """Return `work` of every item, where `parallel` keeps it."""
    return parallel.keep(work, items) if isinstance(parallel, KeepingMap) else list(parallel(work, items))


def keep_tasks(
    parallel: ParallelMap, work: Callable[..., T], bounds: Sequence[slice], **batches: TaskBatches
) -> Sequence[T]:
    """Return `work(tasks, first_task, **batches)` for chunks of tasks, where `parallel` keeps it.

    Work that a KeepingMap computes elsewhere is sent there, so it must not hold all tasks' batches.

    Args:
        parallel: Map over chunks.
        work: Function of the batches from task `first_task` on, and of a slice of these tasks.
        bounds: Chunks of consecutive tasks, in order and without gaps.
        batches: Sequences of batches of all tasks, by the name under which work gets them.
    """
    if isinstance(parallel, KeepingMap):
        return parallel.keep_tasks(work, bounds, **batches)

    def here(tasks: slice) -> T:
        return work(tasks, 0, **batches)

    return list(parallel(here, bounds))


def join_tasks(parallel: ParallelMap, work: Callable[..., T], tasks_together: int, **batches: TaskBatches) -> T:
    """Return `work(parallel, **batches)`, a batch that may be joined from batches of groups of tasks.

    Args:
        parallel: Map over chunks; one that keeps results computes groups where their batches are, and keeps them too.
        work: Function of a map and the batches of some tasks.
        tasks_together: Groups start at multiples of it, and what work gives depends on no other tasks; 0 where it
            depends on all of them.
        batches: Sequences of batches of all tasks, by the name under which work gets them.
    """
    if tasks_together and isinstance(parallel, KeepingMap):
        return parallel.join_tasks(work, tasks_together, **batches)
    return work(parallel, **batches)


def tasks_of(batch: OfTasks | Array, start: int, stop: int) -> Any:
    """Return the tasks start ... stop - 1 of a batch."""
    return batch[start:stop] if isinstance(batch, np.ndarray) else batch.slice(start, stop)
