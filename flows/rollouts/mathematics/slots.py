"""Threads of workers that may compute, and the assignment of chunks to them."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from distributed import Client

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.connection import Connection
from metaloom.flows.rollouts.mathematics.orders import arithmetic
from metaloom.flows.rollouts.workers import usable_cores

log: logging.Logger = logging.getLogger(__name__)


class Slot(NamedTuple):
    """A thread of a worker."""

    worker: str
    thread: int


def slots_of(client: Client) -> list[Slot]:
    """Return the threads of all workers that a scheduler has now."""
    threads = cast(dict[str, int], client.nthreads())
    return [Slot(worker, thread) for worker, number in sorted(threads.items()) for thread in range(number)]


class Slots:
    """The threads of a scheduler's workers, if their arithmetic equals this process's.

    Args:
        connection: Connection to the scheduler.
        required: Use them in any case, rather than only if it is faster.
        elsewhere: True if they may be on other machines.
        num_chunks: Number of chunks of an update.
    """

    def __init__(self, connection: Connection, *, required: bool, elsewhere: bool, num_chunks: int) -> None:
        self._connection, self._required, self._elsewhere = connection, required, elsewhere
        self._worth = most_slots(num_chunks)
        self._found: dict[str, str] = {}

    def chosen(self) -> Sequence[Slot]:
        """Return the threads that should compute now; none if this process should.

        Raises:
            WorkersError: they are required, and one does not compute as this process does.
        """
        slots = slots_of(self._connection.client)
        # Worker processes of our own have the cores that this process has anyway.
        if not self._required and not (self._elsewhere and min(len(slots), self._worth) > usable_cores()):
            return []
        return slots if self._compute_alike({slot.worker for slot in slots}) else []

    def _compute_alike(self, workers: set[str]) -> bool:
        if not self._elsewhere:
            return True
        here, unknown = arithmetic(), workers - self._found.keys()
        for worker, found in self._ask(unknown).items():
            self._found[worker] = found
            if found != here:
                told = f"worker {worker} computes by {found}, this process by {here}"
                if self._required:
                    raise WorkersError(
                        f"mathematics is workers, but {told}; required workers of the same kind with the same "
                        "packages, or --mathematics auto"
                    )
                log.warning("%s; so workers collect episodes only, while it is there", told)
        return all(self._found.get(worker) == here for worker in workers)

    def _ask(self, workers: set[str]) -> dict[str, str]:
        if not workers:
            return {}
        answers = cast(dict[str, Any], self._connection.client.run(arithmetic, workers=[*workers], on_error="return"))
        lacking = {worker: f"no {told.name}" for worker, told in answers.items() if isinstance(told, ImportError)}
        # Whoever has gone meanwhile gives another error.
        return {worker: told for worker, told in answers.items() if isinstance(told, str)} | lacking


def most_slots(num_chunks: int) -> int:
    """Return the useful number of threads: an order costs the trainer 4 ms and a worker some 14 ms per chunk.

    With n of them a call takes 4 n + 14 num_chunks / n, least at n² = 3.5 num_chunks.
    """
    return max(1, math.isqrt(7 * num_chunks // 2))


def assign(held: Sequence[Mapping[str, int]], slots: Sequence[Slot]) -> list[Slot]:
    """Divide chunks evenly among the useful number of slots, preferably to workers that hold much of their data.

    Args:
        held: For every chunk, the amount that workers hold, by address.
        slots: Candidate slots.
    """
    number = min(len(slots), most_slots(len(held)))
    most = -(-len(held) // number)
    taken, chosen = Counter[Slot](), dict[int, Slot]()
    by_worker: dict[str, list[Slot]] = {}
    for slot in slots:
        by_worker.setdefault(slot.worker, []).append(slot)

    def take(n: int, candidates: Iterable[Slot]) -> bool:
        room = [slot for slot in candidates if taken[slot] < most and (taken[slot] or len(+taken) < number)]
        if room:
            chosen[n] = min(room, key=lambda slot: (taken[slot], slot))
            taken[chosen[n]] += 1
        return bool(room)

    for n, holders in enumerate(held):
        by_share = sorted(holders, key=lambda worker: (-holders[worker], worker))
        any(take(n, by_worker.get(worker, ())) for worker in by_share)
    for n in range(len(held)):
        if n not in chosen:
            take(n, slots)
    return [chosen[n] for n in range(len(held))]
