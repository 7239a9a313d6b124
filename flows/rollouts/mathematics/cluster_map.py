"""A map over chunks of tasks on Dask workers.

Every worker gives the results of its chunks undivided, and what takes them adds them in the order of chunks: so bits do
not depend on workers. What is sent with an order is small; batches are where they were made, or are sent there once.
"""

import itertools
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, cast

import dask.config
import numpy as np
from distributed import Future

from metaloom.flows.rollouts.connection import Connection
from metaloom.flows.rollouts.mathematics.dispatch import Answered, Asked, Dispatch, Held, HeldTasks, Made, Maker
from metaloom.flows.rollouts.mathematics.orders import given, together
from metaloom.flows.rollouts.mathematics.places import Piece, Places
from metaloom.flows.rollouts.mathematics.sending import dumps
from metaloom.flows.rollouts.mathematics.slots import Slot, Slots, assign
from metaloom.flows.rollouts.sizes import num_bytes
from metaloom.flows.rollouts.traffic import Traffic
from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.parallel import KeepingMap, OfTasks, TaskBatches, tasks_of
from metaloom.pipeline.types import Array, ParallelMap

T = TypeVar("T")

_MOST_GIVEN_BYTES = 4 * 2**20
_GROUPS_PER_SLOT = 4


class ClusterMap(KeepingMap):
    """Map that computes on the workers that hold the batches.

    Args:
        connection: Connection to the workers' scheduler.
        session: Distinguishes this trainer's work from others'.
        settings: Settings of the run, as JSON, by which workers build its learner.
        learner: Learner of the run.
        here: Local map for everything that no worker holds.
        slots: Slots of the workers.
        places: Locations of batches.
        traffic: Traffic so far.
        versions: Versions that affect results and must be equal on the workers.
        arithmetic: Machine code of this process's arithmetic, which must also be equal; "" if workers define it.
    """

    def __init__(
        self,
        connection: Connection,
        session: str,
        settings: str,
        learner: Learner[Any, Any],
        *,
        here: ParallelMap,
        slots: Slots,
        places: Places,
        traffic: Traffic,
        versions: Mapping[str, str],
        arithmetic: str,
    ) -> None:
        # There may be another of this session, under other settings.
        self._connection, self._session = connection, f"{session}-{secrets.token_hex(4)}"
        self._settings, self._learner = settings, learner
        self.here, self._slots, self._places, self._traffic = here, slots, places, traffic
        self._dispatch = Dispatch(connection, self._session, versions, arithmetic, traffic)
        self._made = weakref.WeakSet[Made]()
        self._numbers = itertools.count()
        self._sent_settings: Future[str] | None = None

    def __call__(self, work: Callable[..., Any], *items: Iterable[Any]) -> Iterable[Any]:
        """Return the results in the order of the items, computed on workers that hold them; see KeepingMap."""
        first, *others = ([*each] for each in items)
        if others or not first or not isinstance(first[0], Held):
            return self.here(work, first, *others)
        held = cast(list[Held], first)
        return self._results(held, self._answers(work, held))

    def keep(self, work: Callable[[Any], T], items: Sequence[Any]) -> Sequence[T]:
        """Keep lazily: workers compute it on first use."""
        if not items or not isinstance(items[0], Held):
            return list(self.here(work, items))
        made = self._add(items[0].made.tasks, (*items[0].made.makers, self._maker(work)))
        return cast(Sequence[T], [Held(made, item.chunk) for item in items])

    def keep_tasks(self, work: Callable[..., T], bounds: Sequence[slice], **batches: TaskBatches) -> Sequence[T]:
        """Keep lazily: workers compute it on first use."""
        if not (slots := self._slots.chosen()):
            return list(self.here(lambda tasks: work(tasks, 0, **batches), bounds))
        made = self._add(self._held(bounds, slots, batches), (self._maker(partial(_of_chunk, work)),))
        return cast(Sequence[T], [Held(made, n) for n in range(len(bounds))])

    def join_tasks(self, work: Callable[..., T], tasks_together: int, **batches: TaskBatches) -> T:
        if not (slots := self._slots.chosen()):
            return work(self.here, **batches)
        num_tasks = _num_tasks(next(iter(batches.values()))[0])
        size = tasks_together * max(1, num_tasks // (tasks_together * _GROUPS_PER_SLOT * len(slots)))
        bounds = [slice(start, min(start + size, num_tasks)) for start in range(0, num_tasks, size)]
        made = Made(self._held(bounds, slots, batches))
        held = [Held(made, n) for n in range(len(bounds))]
        try:
            answers = self._answers(partial(_of_batches, work), held, stays=True)
            joined = together([*self._results(held, answers)])
        except ArithmeticError:
            # In one piece, so that errors number the tasks as they are.
            return work(self.here, **batches)
        pieces = [
            Piece(answered.future, ("results", n), bounds[number].start, bounds[number].stop)
            for answered in answers
            for n, number in enumerate(answered.numbers)
        ]
        # Later ones find it by this very object.
        self._places.remember(joined, sorted(pieces, key=lambda piece: piece.start))
        return joined

    def _results(self, held: Sequence[Held], answers: Sequence[Answered]) -> list[Any]:
        """Fetch the results of items in their order; the fault of the first that has one is raised."""
        results, faults = dict[int, Any](), dict[int, ArithmeticError]()
        for answered, answer in zip(answers, self._dispatch.fetch(answers), strict=True):
            results |= zip(answered.numbers, answer.unpacked(), strict=False)
            if answer.fault is not None:
                faults[answered.numbers[len(answer.unpacked())]] = answer.fault
        if faults:
            raise faults[min(faults)]
        return [results[n] for n in range(len(held))]

    def _add(self, tasks: HeldTasks, makers: Sequence[Maker]) -> Made:
        made = Made(tasks, makers)
        self._made.add(made)
        return made

    def _maker(self, work: object) -> Maker:
        return Maker(next(self._numbers), self._give(dumps(work, self._learner), "maker"))

    def _held(self, bounds: Sequence[slice], slots: Sequence[Slot], batches: Mapping[str, TaskBatches]) -> HeldTasks:
        pieces = {name: [self._pieces(batch, slots) for batch in several] for name, several in batches.items()}
        futures = {piece.future.key: piece.future for each in pieces.values() for of in each for piece in of}
        self._dispatch.wait([*futures.values()])
        where = cast(dict[str, Sequence[str]], self._connection.client.who_has([*futures.values()]))
        held = [_held_by(tasks, pieces, where) for tasks in bounds]
        return HeldTasks(bounds, pieces, assign(held, slots))

    def _pieces(self, batch: OfTasks | Array, slots: Sequence[Slot]) -> Sequence[Piece]:
        """Return where a batch is, after it was sent there if it was nowhere."""
        if not (known := self._places.of(batch)):
            number, size = _num_tasks(batch), num_bytes(batch)
            parts = min(number, max(len(slots), -(-size // _MOST_GIVEN_BYTES)))
            ends = [number * part // parts for part in range(parts + 1)]
            cuts = [tasks_of(batch, start, stop) for start, stop in itertools.pairwise(ends)]
            workers = [slots[part * len(slots) // parts].worker for part in range(parts)]
            sent = [self._give(cut, "tasks", worker) for cut, worker in zip(cuts, workers, strict=True)]
            self._places.remember(
                batch, [Piece(future, (), *ends) for future, ends in zip(sent, itertools.pairwise(ends), strict=True)]
            )
            known = self._places.of(batch)
        return known

    def _give(self, value: Any, name: str, worker: str | None = None) -> Future[Any]:
        """Send a value as part of a task, so that Dask can give it to another worker if one is lost."""
        self._traffic.sent_bytes += len(value) if isinstance(value, bytes | str) else num_bytes(value)
        key = f"{name}-{self._session}-{next(self._numbers)}"
        workers = [worker] if worker else None
        # Dask warns of large tasks, since most people's should not be; a task's images are.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
            return self._connection.client.submit(
                given, value, key=key, pure=False, workers=workers, allow_other_workers=bool(worker)
            )

    def _answers(self, work: Callable[..., Any], held: Sequence[Held], *, stays: bool = False) -> list[Answered]:
        live = frozenset(maker.token for made in self._made for maker in made.makers)
        # What another client was given went with its scheduler.
        if self._sent_settings is None or self._sent_settings.client is not self._connection.client:
            self._sent_settings = self._give(self._settings, "settings")
        asked = Asked(_name(work), dumps(work, self._learner), self._sent_settings, live, stays=stays)
        return self._dispatch.ask(asked, held)


def _of_chunk(work: Callable[..., T], item: tuple[slice, int, Mapping[str, Any]]) -> T:
    tasks, first_task, batches = item
    return work(tasks, first_task, **batches)


def _of_batches(work: Callable[..., T], item: tuple[slice, int, Mapping[str, Any]]) -> T:
    _, _, batches = item
    return work(map, **batches)


def _held_by(
    tasks: slice, pieces: Mapping[str, Sequence[Sequence[Piece]]], where: Mapping[str, Sequence[str]]
) -> Mapping[str, int]:
    """Count how many of a chunk's tasks each worker holds, over all batches."""
    found = Counter[str]()
    for each in pieces.values():
        for piece in itertools.chain.from_iterable(each):
            shared = min(tasks.stop, piece.stop) - max(tasks.start, piece.start)
            if shared > 0:
                found.update(dict.fromkeys(where.get(str(piece.future.key), ()), shared))
    return found


def _num_tasks(batch: Any) -> int:
    """Count the tasks of a batch, by the first of its arrays."""
    while not isinstance(batch, np.ndarray):
        parts = batch.values() if isinstance(batch, Mapping) else (getattr(batch, f.name) for f in fields(batch))
        batch = next(iter(parts))
    return len(batch)


def _name(work: Callable[..., Any]) -> str:
    """Name work for Dask's pages by the function that asks for it."""
    while isinstance(work, partial):
        work = work.args[0] if work.args and callable(work.args[0]) else work.func
    return str(getattr(work, "__qualname__", type(work).__qualname__)).partition(".")[0].strip("_")
