"""Orders to workers and their execution, chunk by chunk, with values kept from earlier orders.

Kept values are not Dask data: curvatures hold graphs of derivatives, which cannot be sent. A worker that has lost one
computes it again from batches that Dask keeps.
"""

import ctypes
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from dask.sizeof import sizeof
from threadpoolctl import threadpool_limits

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.mathematics.sending import config_of, loads, packed
from metaloom.flows.rollouts.sizes import num_bytes
from metaloom.flows.rollouts.versions import require_own_to_compute
from metaloom.pipeline.config.sources import plugin_paths
from metaloom.pipeline.global_random import GlobalRandomWatch
from metaloom.pipeline.nn.device import arithmetic_facts
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.parallel import OfTasks, tasks_of
from metaloom.pipeline.plugin_files import own_paths
from metaloom.pipeline.types import Array
from metaloom.stages.faults import StageFault

_FORGET_AFTER_SECONDS = 600.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Cut(NamedTuple):
    """Some tasks of a value that accompanies an order.

    Attributes:
        value: Index among the values.
        path: Attributes and indices that lead from the value to the batch.
        start, stop: Range of tasks in the batch.
    """

    value: int
    path: tuple[str | int, ...]
    start: int
    stop: int


class Maker(NamedTuple):
    """Work that makes what is kept.

    Attributes:
        token: Identifies it.
        value: Index among the values of the work, as bytes.
    """

    token: int
    value: int


@dataclass(frozen=True)
class ChunkOrder:
    """A chunk of tasks.

    Attributes:
        first_task: First task of the chunk.
        num_tasks: Number of tasks in it.
        batches: Sequences of batches by name, each batch in cuts of consecutive tasks.
        makers: Works that make an item from the batches, applied in turn; without any, the batches are the item.
    """

    first_task: int
    num_tasks: int
    batches: Mapping[str, Sequence[Sequence[Cut]]]
    makers: tuple[Maker, ...]


@dataclass(frozen=True)
class Order:
    """Chunks that a worker thread computes in sequence.

    Attributes:
        session: Session of the trainer.
        live: Tokens of kept values that may be needed again.
        settings: Index among the values of the run's settings, as JSON.
        work: Index among the values of the work, as bytes, that turns an item into an answer.
        chunks: Chunks, in order.
        stays: True if the results are batches for later orders, rather than answers for the trainer.
        versions: Versions that affect results and must be equal on the worker.
        arithmetic: Machine code of the trainer's arithmetic, which must also be equal; "" for a worker started by it.
    """

    session: str
    live: frozenset[int]
    settings: int
    work: int
    chunks: tuple[ChunkOrder, ...]
    stays: bool
    versions: Mapping[str, str]
    arithmetic: str


@dataclass(frozen=True)
class Answer:
    """Result of an order.

    Attributes:
        results: Results of its chunks, up to a fault; as bytes unless they stay.
        fault: Fault that ended them.
    """

    results: tuple[Any, ...] | bytes
    fault: ArithmeticError | None

    def unpacked(self) -> Sequence[Any]:
        """Return the results."""
        return pickle.loads(self.results) if isinstance(self.results, bytes) else self.results


sizeof.register(Answer, num_bytes)


def given(value: object) -> object:
    """Return the value, so that Dask keeps it on a worker."""
    return value


def compute(order: Order, values: Sequence[Any]) -> Answer:
    """Compute an order's chunks. Runs on a worker.

    Raises:
        WorkersError: this worker computes with other versions than the trainer, or by other machine code.
    """
    settings = cast(str, values[order.settings])
    if order.arithmetic and (there := arithmetic()) != order.arithmetic:
        raise WorkersError(
            f"the Dask worker on {socket.gethostname()} computes by {there}, the trainer by {order.arithmetic}; "
            "required the same, or digests would differ: workers of one kind, or --mathematics here"
        )
    require_own_to_compute(order.versions, plugin_paths(config_of(settings)))
    _prepare_process()
    _kept.forget(order.session, order.live)
    results, fault = list[Any](), None
    items = _Items(order.session, settings, values)
    # As in the trainer's threads: non-finite values are detected later, with a better message.
    with normal_numerics(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        work: Callable[[Any], Any] = loads(values[order.work], items.settings)
        try:
            for chunk in order.chunks:
                result, draw = _random_watch(settings).draw_of(
                    lambda chunk=chunk: work(items.item(chunk, chunk.makers)), "a learner's stages"
                )
                if draw is not None:
                    raise StageFault(str(draw))
                results.append(result)
        except ArithmeticError as error:
            fault = error
            fault.__cause__ = fault.__context__ = None
            fault = fault.with_traceback(None)
    return Answer(tuple(results) if order.stays else packed(results), fault)


@lru_cache(maxsize=4)
def _random_watch(settings: str) -> GlobalRandomWatch:
    return GlobalRandomWatch(on=bool(own_paths(plugin_paths(config_of(settings)))))


@cache
def _prepare_process() -> None:
    # More than one BLAS or torch thread would make bits depend on the machine and take the neighbours' cores.
    threadpool_limits(1)
    torch.set_num_threads(1)
    # Let the C library keep freed memory, as it does by default; Dask makes it return all at once. A
    # meta-gradient allocates its tensors over and over: with Dask's setting it takes twice the processor time.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)


@dataclass(frozen=True)
class _Items:
    """Makes items of an order's values."""

    session: str
    settings: str
    values: Sequence[Any]

    def item(self, chunk: ChunkOrder, makers: tuple[Maker, ...]) -> Any:
        """Apply the makers to a chunk, unless the result exists."""
        if not makers:
            return slice(0, chunk.num_tasks), chunk.first_task, batches_of(chunk, self.values)
        key = (self.session, makers[-1].token, chunk.first_task)
        if (found := _kept.get(key)) is None:
            work = loads(self.values[makers[-1].value], self.settings)
            found = work(self.item(chunk, makers[:-1]))
            _kept.put(key, found)
        return found


def batches_of(chunk: ChunkOrder, values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the batches of a chunk's tasks."""
    return {name: [_batch(cuts, values) for cuts in batches] for name, batches in chunk.batches.items()}


def _batch(cuts: Sequence[Cut], values: Sequence[Any]) -> Any:
    parts = [tasks_of(_follow(values[cut.value], cut.path), cut.start, cut.stop) for cut in cuts]
    return parts[0] if len(parts) == 1 else together(parts)


def _follow(value: Any, path: Sequence[str | int]) -> OfTasks | Array:
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def together(parts: Sequence[Any]) -> Any:
    """Join batches of several tasks into one, in their order."""
    kind: Any = type(parts[0])
    return np.concatenate(parts) if kind is np.ndarray else kind.concatenate(parts)


def arithmetic() -> str:
    """Describe the machine code that computes in this process. Runs on workers too."""
    facts = arithmetic_facts()
    return f"{facts['blas']}, torch's {facts['torch']} and NumPy's {facts['numpy']}"


class _Kept:
    """Values that the threads of this process keep for later orders. Forgotten values are recomputed on demand."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, int], Any] = {}
        self._asked: dict[str, float] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int, int]) -> Any:
        return self._values.get(key)

    def put(self, key: tuple[str, int, int], value: Any) -> None:
        with self._lock:
            self._values[key] = value

    def forget(self, session: str, live: frozenset[int]) -> None:
        """Drop values that a session will not use again, and values of sessions that ended silently."""
        with self._lock:
            now = time.monotonic()
            self._asked[session] = now
            self._asked = {name: at for name, at in self._asked.items() if now - at < _FORGET_AFTER_SECONDS}
            self._values = {
                key: value
                for key, value in self._values.items()
                if key[0] in self._asked and (key[0] != session or key[1] in live)
            }


_kept = _Kept()
