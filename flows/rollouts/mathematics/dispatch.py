"""Orders on their way to workers and back, and to others where a worker is lost."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from distributed import Future, KilledWorker

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.connection import Connection
from metaloom.flows.rollouts.mathematics import orders
from metaloom.flows.rollouts.mathematics.orders import Answer, ChunkOrder, Cut, Order, compute
from metaloom.flows.rollouts.mathematics.places import Piece
from metaloom.flows.rollouts.mathematics.slots import Slot, slots_of
from metaloom.flows.rollouts.sizes import num_bytes
from metaloom.flows.rollouts.traffic import Traffic
from metaloom.flows.rollouts.waiting import Patience


class Maker(NamedTuple):
    """Work, as bytes that workers hold, and a name for what it makes of a chunk."""

    token: int
    work: Future[bytes]


@dataclass(eq=False)
class HeldTasks:
    """Batches that workers hold, and chunks of their tasks.

    Attributes:
        bounds: Bounds of the chunks.
        batches: Sequences of batches by name, each batch in pieces.
        slots: Slots that compute the chunks; replaced where a worker is lost.
    """

    bounds: Sequence[slice]
    batches: Mapping[str, Sequence[Sequence[Piece]]]
    slots: list[Slot]


@dataclass(eq=False)
class Made:
    """Values that workers make of chunks and keep."""

    tasks: HeldTasks
    makers: Sequence[Maker] = ()


@dataclass(frozen=True, eq=False)
class Held:
    """Value made of one chunk, on a worker."""

    made: Made
    chunk: int

    def __len__(self) -> int:
        tasks = self.made.tasks.bounds[self.chunk]
        return tasks.stop - tasks.start


@dataclass(frozen=True)
class Asked:
    """Work to do on every item.

    Attributes:
        name: Name on Dask's pages.
        work: The work as bytes.
        settings: Settings of the run.
        live: As in Order.
        stays: As in Order.
    """

    name: str
    work: bytes
    settings: Future[str]
    live: frozenset[int]
    stays: bool


@dataclass(frozen=True)
class Answered:
    """An order that a worker has, or has computed.

    Attributes:
        numbers: Indices of its items, in order.
        future: Future of its Answer.
    """

    numbers: Sequence[int]
    future: Future[Answer]


@dataclass(frozen=True)
class Dispatch:
    """Dispatcher of orders to workers.

    Attributes:
        connection: Connection to their scheduler.
        session: Distinguishes this trainer's work from others'.
        versions: Versions that affect results and must be equal on the workers.
        arithmetic: Machine code of this process's arithmetic, which must also be equal; "" if workers define it.
        traffic: Traffic so far.
    """

    connection: Connection
    session: str
    versions: Mapping[str, str]
    arithmetic: str
    traffic: Traffic
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, asked: Asked, items: Sequence[Held]) -> list[Answered]:
        """Have every item computed by its worker; returns when all are.

        Raises:
            WorkersError: there has been no worker for long, or one has other versions.
            CancelledError: the scheduler is gone.
        """
        there, by_slot = slots_of(self.connection.client), dict[Slot, list[int]]()
        workers = {slot.worker for slot in there}
        for n, item in enumerate(items):
            slots = item.made.tasks.slots
            if slots[item.chunk].worker not in workers and there:  # it is gone, and others get its items
                slots[item.chunk] = there[item.chunk % len(there)]
            by_slot.setdefault(slots[item.chunk], []).append(n)
        waiting = [self._send(asked, items, *of_slot) for of_slot in by_slot.items()]
        done: list[Answered] = []
        patience = Patience(self.connection.client, 0.0)
        try:
            while waiting:
                patience.any_done([answered.future for answered in waiting])
                done += [answered for answered in waiting if answered.future.done()]
                waiting = [answered for answered in waiting if not answered.future.done()]
                for answered in done:
                    if answered.future.status != "finished":
                        answered.future.result()
        except KilledWorker as error:
            raise WorkersError(
                "workers died one after the other of the same mathematics: they may lack memory, or somebody kills "
                "them. What is stored is safe; go on with `metaloom resume`, and --mathematics here if it happens again"
            ) from error
        finally:
            if waiting:  # after an error the others' work is of no use, and holds the workers
                self.connection.client.cancel([answered.future for answered in waiting])
        return done

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Return when workers hold what is on its way to them.

        Raises:
            WorkersError: there has been no worker for long.
        """
        patience = Patience(self.connection.client, 0.0)
        while waiting := [future for future in futures if not future.done()]:
            patience.any_done(waiting)

    def fetch(self, answers: Sequence[Answered]) -> list[Answer]:
        """Fetch the results of orders."""
        found = cast(list[Answer], self.connection.client.gather([answered.future for answered in answers]))
        self.traffic.received_bytes += sum(num_bytes(answer) for answer in found)
        return found

    def _send(self, asked: Asked, items: Sequence[Held], slot: Slot, numbers: Sequence[int]) -> Answered:
        values = _Values()
        chunks = tuple(values.chunk(items[n]) for n in numbers)
        order = Order(
            self.session,
            asked.live,
            values.number(asked.settings),
            values.number(asked.work),
            chunks,
            asked.stays,
            self.versions,
            self.arithmetic,
        )
        self.traffic.sent_bytes += len(asked.work)
        first = min(chunk.first_task for chunk in chunks)
        future = self.connection.client.submit(
            compute,
            order,
            values.all,
            key=f"{asked.name}-task{first}-{self.session}-{next(self.numbers)}",
            pure=False,
            # Another worker, if this one is lost, computes again what it has not kept.
            workers=[slot.worker],
            allow_other_workers=True,
        )
        return Answered(numbers, future)


class _Values:
    """Collects the values that an order comes with, each once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[object, int] = {}

    def number(self, value: Future[Any] | bytes) -> int:
        key = value.key if isinstance(value, Future) else id(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(value)
        return self._numbers[key]

    def chunk(self, item: Held) -> ChunkOrder:
        tasks = item.made.tasks.bounds[item.chunk]
        batches = {
            name: tuple(self._cuts(pieces, tasks) for pieces in several)
            for name, several in item.made.tasks.batches.items()
        }
        makers = tuple(orders.Maker(maker.token, self.number(maker.work)) for maker in item.made.makers)
        return ChunkOrder(tasks.start, len(item), batches, makers)

    def _cuts(self, pieces: Sequence[Piece], tasks: slice) -> tuple[Cut, ...]:
        inside = [piece for piece in pieces if piece.start < tasks.stop and piece.stop > tasks.start]
        return tuple(
            Cut(
                self.number(piece.future),
                piece.path,
                max(tasks.start, piece.start) - piece.start,
                min(tasks.stop, piece.stop) - piece.start,
            )
            for piece in inside
        )
