"""Writing of runs: a single writer publishes immutable outputs atomically."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import Any, Self, TypeVar

from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.storage.errors import (
    BudgetReached,
    DamagedRun,
    FencedOut,
    LayoutMismatch,
    StageExists,
    StageMissing,
    StoreError,
    system_errors,
)
from metaloom.storage.format.codec import Value, encode, flatten
from metaloom.storage.format.places import argument
from metaloom.storage.format.records import StageRecord
from metaloom.storage.format.thinning import Retention, Thinned, thinnable
from metaloom.storage.keep.thinner import Thinner
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.history import RecordChain
from metaloom.storage.run import Run
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.creation import WRITABLE
from metaloom.storage.write.holder import is_asked_to_stop
from metaloom.storage.write.packer import Packer
from metaloom.storage.write.publisher import Output, Publisher
from metaloom.storage.write.sessions import Session

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_QUEUE_DEPTH = 2
_RECENT_OUTPUTS = 16
_RECENT_BYTES = 256 * 2**20


class RunWriter:
    """The single writer of a run; usable as a context manager.

    Outputs are written in a background thread, so arrays passed to `put` must not be changed. Errors in the thread are
    raised by the next call, and nothing more is stored. `repaired` has a line per file repaired on opening the run.
    """

    def __init__(
        self,
        run: Run,
        session: Session,
        arrays: ArrayStore,
        history: RecordChain,
        retention: Retention,
        repaired: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.repaired = repaired
        self._session = session
        self._arrays = arrays
        self._history = history
        self._publisher = Publisher(run.files, session, arrays, history, run.info)
        self._thinner = Thinner(run.files, session, arrays)
        self._packer = Packer(run.files, session, history.digests, str(run.info["format"]))
        self._packer.finish()
        self._retention = retention
        self._whole: set[int] = set()
        if retention.thins:
            complete = {ref.iteration for ref in history.digests if ref.stage == run.stages.last}
            self._whole = complete.difference(run.files.thinned_iterations())
        limit = retention.max_bytes
        self._budget = None if limit is None else Budget(run.path, limit, run.files.num_bytes())
        self._lock = threading.Lock()
        self._pending: dict[StageRef, Value] = {}
        self._recent: OrderedDict[StageRef, tuple[Value, int]] = OrderedDict()
        self._queue = BackgroundQueue(self._publish, _QUEUE_DEPTH)
        self._closed = False

    @property
    def capacity(self) -> int:
        """Number of iterations for which arrays are allocated."""
        return self._arrays.capacity

    def contains(self, ref: StageRef) -> bool:
        """Return True if an output is stored or queued."""
        with self._lock:
            return ref in self._pending or ref in self._history.digests

    def is_whole(self, iteration: int) -> bool:
        """Return True if an iteration is packed and therefore complete; others must be checked output by output."""
        # Packed iterations were complete, and no record has been lost since.
        return not self._history.lost and self.run.files.segments.holding(self.run.last_ref(iteration)) is not None

    def put(
        self,
        ref: StageRef,
        value: Value,
        *,
        inputs: Sequence[StageRef | Span],
        seed_position: Sequence[int],
        started: float,
        seconds: float,
    ) -> None:
        """Queue a stage's output for storage, blocking while two others are queued.

        `started` is in seconds since 1970. The output's random streams derive from `seed_position`.

        Raises:
            StageExists: the output is already stored.
            StageMissing: an input is not stored, or a span is empty.
            LayoutMismatch: the value does not match the stage's layout, or the run's capacity is exceeded.
            BudgetReached: the run would exceed its size limit.
        """
        self._queue.check()
        self._check(ref, inputs)
        pieces = tuple(encode(self.run.stages, ref, value))
        output = Output(ref, value, pieces, tuple(inputs), tuple(seed_position), started, seconds)
        with self._lock:
            if self._budget:
                self._budget.reserve(ref, value)
            self._pending[ref] = value
        try:
            self._queue.submit(output)
        except BaseException:
            with self._lock:
                self._pending.pop(ref, None)
            raise
        size = sum(array.nbytes for array in flatten(value).values())
        with self._lock:  # recent outputs stay in memory, with limited number and size
            self._recent[ref] = (value, size)
            while len(self._recent) > _RECENT_OUTPUTS or (
                len(self._recent) > 1 and sum(size for _, size in self._recent.values()) > _RECENT_BYTES
            ):
                self._recent.popitem(last=False)

    def load(self, ref: StageRef) -> Value:
        """Load an output from memory if it is recent, otherwise from disk."""
        value = self._in_memory(ref)
        return self._read(self.run.load, ref) if value is None else value

    def lengths(self, ref: StageRef) -> Array:
        """Read only the episode lengths of a batch, [B, E] int32."""
        value = self._in_memory(ref)
        return value.lengths if isinstance(value, EpisodeBatch) else self._read(self.run.lengths, ref)

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Load a batch of episodes. If read from disk, it has no behavior, reward terms, facts or initial states."""
        value = self._in_memory(ref)
        return value if isinstance(value, EpisodeBatch) else self._read(self.run.experience, ref)

    def record(self, ref: StageRef) -> StageRecord:
        """Return an output's record, waiting until it is published."""
        if ref in self._pending:
            self.flush()
        return self.run.record(ref)

    @property
    def session(self) -> int:
        """Number of the writing session."""
        return self._session.number

    def is_asked_to_stop(self) -> bool:
        """Return True if another process has asked this writer to stop; see `storage.ask_to_stop`."""
        return is_asked_to_stop(self.run.path, self._session.token)

    def describe(self, environment: Mapping[str, Any]) -> None:
        """Record this session's environment, as plain JSON data; see `Run.environment_of`.

        If this is never called, the first session uses the environment passed to `create_run`.
        """
        self.flush()
        with self._writing():
            self._session.describe({"environment": dict(environment)})

    def thin(self, iterations: Iterable[int], progress: Progress = unseen) -> Thinned:
        """Remove the recomputable arrays of complete iterations; see `StoredStage.thinnable`.

        Raises StageMissing if an iteration is not complete. `progress` receives the number of iterations thinned and
        the total.
        """
        self.flush()
        chosen = {*self.run.select([*iterations])}
        with self._writing():
            return self._thinner.thin(self._thinnable(chosen), progress)

    def thin_learners(self, every: int) -> Thinned:
        """Remove the learners with which complete iterations start, except iterations 0, every, 2 * every, ...

        The newest learner is also kept. This is for copies of runs, such as references: their outputs can then be
        recomputed only from the remaining learners.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.flush()
        refs = [self.run.learner_ref(i) for i in self.run.iterations if i % every]
        with self._writing():
            return self._thinner.thin(refs)

    def pack(self, progress: Progress = unseen) -> list[range]:
        """Pack all complete iterations but the newest into segments; return each new segment's iterations.

        Raises StoreError if the run's format does not support segments, and DamagedRun if a file to pack is damaged;
        earlier segments remain.
        """
        self.flush()
        with self._writing():
            return self._packer.pack(progress)

    def restore(self, values: Mapping[StageRef, Value]) -> None:
        """Restore one iteration's thinned outputs from recomputed arrays.

        Raises StageExists if an output is not thinned, and DigestMismatch if a value differs from its record, in which
        case nothing is restored.
        """
        self.flush()
        with self._writing():
            self._thinner.restore(values)

    def flush(self) -> None:
        """Wait until all outputs are published. Raises pending errors."""
        self._queue.wait()

    def close(self) -> None:
        """Publish queued outputs and end the session. Raises pending errors."""
        if not self._closed:
            self._closed = True
            self._queue.stop()
            with self._writing():
                try:
                    if not self._queue.failed:
                        self._session.seal(self._history.head)
                except FencedOut:  # nothing was left to store, and the later writer knows the records
                    _LOG.info("%s was taken over before it was closed", self.run.path)
                finally:
                    self._session.close()
            self._queue.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as own:
            if error is None:
                raise
            # An error in the block takes precedence.
            if own is not error:
                _LOG.warning("not everything could be stored: %s", own, exc_info=not isinstance(own, StoreError))

    def _has(self, item: StageRef | Span) -> bool:
        if isinstance(item, StageRef):
            return self.contains(item)
        if any(self.contains(StageRef(item.first, stage)) for stage in item.stages):
            return True
        with self._lock:
            # Copies, because the publishing thread adds to both.
            return any(ref in item for ref in [*self._pending, *self._history.digests])

    def _read(self, read: Callable[[StageRef], T], ref: StageRef) -> T:
        try:
            return read(ref)
        except DamagedRun:
            # Array metadata removed by a repair is rewritten with an output that may still be queued.
            self.flush()
            return read(ref)

    def _in_memory(self, ref: StageRef) -> Value | None:
        with self._lock:
            value, _ = self._recent.get(ref, (None, None))
            return self._pending.get(ref, value)

    def _writing(self) -> AbstractContextManager[None]:
        again = f"`metaloom resume {argument(self.run.path)}` continues after what was stored"
        return system_errors(self.run.path, required=WRITABLE, action=f"Free space or repair the disk; then {again}")

    def _publish(self, output: Output) -> None:
        with self._writing():
            written = self._publisher.publish(output)
            freed = 0
            if output.ref.stage == self.run.stages.last:
                if self._retention.thins:  # not needed once an iteration is complete
                    self._whole.add(output.ref.iteration)
                    complete = max(self._whole) + 1
                    done = {i for i in self._whole if not self._retention.keeps(i, complete)}
                    self._whole -= done
                    freed = self._thinner.thin(self._thinnable(done)).num_bytes
                self._packer.pack_old()
        with self._lock:
            self._pending.pop(output.ref, None)
            if self._budget:
                self._budget.release(output.ref, written - freed)

    def _thinnable(self, iterations: set[int]) -> list[StageRef]:
        refs = (ref for iteration in iterations for ref in self._history.digests.of(iteration))
        return thinnable(refs, iterations, self.run.stages)

    def _check(self, ref: StageRef, inputs: Sequence[StageRef | Span]) -> None:
        if self._closed:
            raise ValueError("this RunWriter is closed; open the run again to write")
        if self.contains(ref):
            raise StageExists(
                self.run.path,
                found=f"{ref} is already stored",
                required="an output that is not stored yet",
                action="Check `contains` first",
            )
        if ref.stage not in self.run.stages:
            raise LayoutMismatch(
                self.run.path,
                found=str(ref),
                required=f"a stage of the run: {', '.join(stage.name for stage in self.run.stages.stages)}",
                action="Create the run with its algorithm's stage table",
            )
        if ref.iteration >= self.capacity:
            raise LayoutMismatch(
                self.run.path,
                found=str(ref),
                required=f"an iteration below the capacity of {self.capacity}",
                action="Open the run with a larger `capacity`",
            )
        for missing in (item for item in inputs if not self._has(item)):
            raise StageMissing(
                self.run.path,
                found=f"{missing}, an input of {ref}, is not stored",
                required="inputs that are stored",
                action="Put the inputs first",
            )


class BackgroundQueue:
    """Thread that runs jobs in order, with at most `depth` jobs waiting."""

    def __init__(self, work: Callable[[Output], None], depth: int) -> None:
        self._work = work
        self._jobs: Queue[Output | None] = Queue(depth)
        self._error: BaseException | None = None
        # A daemon, so that a process that ends without closing does not hang; uncommitted outputs are recomputed.
        self._thread = threading.Thread(target=self._run, name="metaloom-store", daemon=True)
        self._thread.start()

    def submit(self, job: Output) -> None:
        """Queue a job, blocking while the queue is full. Raises the first error of an earlier job."""
        self.check()
        self._jobs.put(job)
        self.check()  # a job may have failed while the queue was full

    def wait(self) -> None:
        """Wait until all jobs are done. Raises the first error."""
        self._jobs.join()
        self.check()

    def check(self) -> None:
        """Raise the first error of any job, if there is one."""
        if self._error is not None:
            raise self._error

    @property
    def failed(self) -> bool:
        """True once a job has raised an error."""
        return self._error is not None

    def stop(self) -> None:
        """Finish the queued jobs and end the thread, without raising errors."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            if self._error is None:
                try:
                    self._work(job)
                except BaseException as error:
                    # Later jobs depend on this one: drop them, and raise the error at the next call.
                    self._error = error
            self._jobs.task_done()
        self._jobs.task_done()


_WARN_AT = 0.9
_BESIDES_ARRAYS = 64 * 2**10  # upper bound for a record, tables and checksums


class Budget:
    """Total size of a run's files in bytes, and its limit. Not thread-safe."""

    def __init__(self, root: Path, limit: int, used: int) -> None:
        self._root = root
        self._limit = limit
        self._used = used
        self._reserved: dict[StageRef, int] = {}
        self._warned = False

    def reserve(self, ref: StageRef, value: Value) -> None:
        """Reserve an output's maximum size. Raises BudgetReached if the limit does not allow it."""
        need = sum(array.nbytes for array in flatten(value).values()) + _BESIDES_ARRAYS
        if self._used + sum(self._reserved.values()) + need > self._limit:
            name = argument(self._root)
            raise BudgetReached(
                self._root,
                found=f"{self._used} bytes, and up to {need} more to store {ref}",
                required=f"at most {self._limit} bytes (retention.max_bytes)",
                action=f"Committed data is intact. `metaloom thin {name} --keep-every 10` makes room for "
                f"`metaloom resume {name}`; `metaloom resume {name} --set retention.max_bytes=...` raises the limit",
            )
        self._reserved[ref] = need

    def release(self, ref: StageRef, written: int) -> None:
        """Replace an output's reservation with the net number of bytes written, negative if thinning removed more."""
        self._reserved.pop(ref, None)
        self._used += written
        if self._used > _WARN_AT * self._limit and not self._warned:
            self._warned = True
            share = self._used / self._limit
            _LOG.warning("%s holds %d bytes, %.0f%% of its limit", self._root, self._used, 100 * share)
