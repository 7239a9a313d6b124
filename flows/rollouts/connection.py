"""Connection to rollout workers, which are local processes or belong to an existing scheduler."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import dask.config
from dask.utils import parse_timedelta
from distributed import Client, Future, Security, rpc, wait
from distributed.comm.core import CommClosedError
from distributed.scheduler import NoWorkerError
from distributed.utils import LoopRunner

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.local_cluster import local_client
from metaloom.flows.rollouts.supervised import check_worker, fingerprint, require_versions
from metaloom.flows.rollouts.workers import Backend, SamplerSpec, usable_cores
from metaloom.pipeline.arithmetic import acting_facts
from metaloom.pipeline.schema import ConfigError

_WAIT_SECONDS = 1.0
_NO_WORKER_SECONDS = 60.0


class PausedWorkers(WorkersError):
    """Raised if Dask has paused every worker that still has work, so no work progresses."""


class Patience:
    """Waits for futures as long as a worker can run them, and for a limited time if none can."""

    def __init__(self, client: Client, step_timeout_seconds: float) -> None:
        # A worker that is cut off during an environment call is ended, with the reason, after the step timeout.
        self._client, self._most = client, max(no_worker_seconds(), 2 * step_timeout_seconds)
        self._alone_since: float | None = None

    def any_done(self, futures: Sequence[Future[Any]]) -> bool:
        """Wait briefly for all futures; return True if any of them is done or has failed.

        Waiting for each future in turn would take longer than a short rollout batch. Raises WorkersError if there has
        been no worker, or PausedWorkers if Dask has paused the futures' workers, for longer than both
        `no_worker_seconds` and two step timeouts.
        """
        with suppress(TimeoutError):
            wait(futures, timeout=_WAIT_SECONDS)
        if any(future.done() for future in futures):
            self._alone_since = None
            return True
        workers = cast(dict[str, dict[str, Any]], self._client.scheduler_info(n_workers=-1)["workers"])
        # A paused worker still finishes what it has begun.
        begun = {a: w.get("metrics", {}).get("task_counts", {}).get("executing", 0) for a, w in workers.items()}
        paused = {address for address, worker in workers.items() if worker["status"] == "paused" and not begun[address]}
        if workers and not (paused and (len(paused) == len(workers) or self._wait_for(futures, paused))):
            self._alone_since = None
            return False
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since < self._most:
            return False
        if not workers:
            raise no_worker_for(self._most)
        raise PausedWorkers(
            f"Dask has paused {len(paused)} of {len(workers)} workers for lack of memory, and they have not "
            f"started their work for {self._most:g} s. Give each more memory with `dask worker --memory-limit`, "
            "or use fewer --workers. Stored data is safe; continue with `metaloom resume`"
        )

    def _wait_for(self, futures: Sequence[Future[Any]], paused: set[str]) -> bool:
        """Return True if all the futures are assigned to paused workers, whose tasks Dask does not reassign."""
        given = cast(dict[str, tuple[str, ...]], self._client.processing())
        theirs = {key for worker in paused for key in given.get(worker, ())}
        return all(future.key in theirs for future in futures)


def wait_for(client: Client, futures: Sequence[Future[Any]], step_timeout_seconds: float = 0.0) -> None:
    """Wait until any of the futures is done or has failed; raise WorkersError if no worker can run them in time."""
    patience = Patience(client, step_timeout_seconds)
    while not patience.any_done(futures):
        pass


LONGER = (
    "If workers take longer to start, raise the limit: DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=15m for "
    "both the scheduler and the trainer"
)


def no_worker_for(seconds: float) -> WorkersError:
    """Return the error for a scheduler that has had no worker for `seconds`."""
    return WorkersError(
        f"the Dask scheduler has had no worker for {seconds:g} s; start one with `dask worker`, and continue with "
        f"`metaloom resume`. {LONGER}"
    )


def no_worker_seconds() -> float:
    """Return the time in seconds to wait for a worker: Dask's setting if there is one, otherwise 60."""
    setting = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return _NO_WORKER_SECONDS if setting is None else cast(float, parse_timedelta(setting))


log: logging.Logger = logging.getLogger(__name__)
# If a connection is lost during a write, this logger prints a traceback besides our own message.
logging.getLogger("distributed.batched").setLevel(logging.WARNING)
# The same for a client that is closed while it reconnects.
logging.getLogger("distributed.client").addFilter(
    lambda record: not (record.exc_info and record.exc_info[0] is asyncio.CancelledError)
)

T = TypeVar("T")

_ANSWER_SECONDS = 10.0
_BACK_SECONDS = 300.0
_MOST_LOSSES = 3
_LOOK_EVERY_SECONDS = 10.0
_SILENT_SECONDS = 30.0
_MOST_SILENCES = 2  # this process itself may have been suspended


class NobodyThere(WorkersError):
    """Raised if no scheduler responds or the scheduler has no worker; either may be temporary."""


class Connection:
    """Connection to a scheduler; its client is replaced when the scheduler has restarted.

    Dask's own client tries to reconnect only for a short time, and loses registered worker callbacks.
    """

    def __init__(self, connect: Callable[[], AbstractContextManager[Client]], opened: ExitStack) -> None:
        self._connect, self._opened = connect, opened
        self._open()

    @property
    def num_threads(self) -> int:
        """Current total number of worker threads; 0 without a scheduler."""
        with suppress(Exception):  # the scheduler may disappear during the call
            if self.client.status == "running":
                return sum(cast(dict[str, int], self.client.nthreads()).values())
        return 0

    def repeat_where_lost(self, work: Callable[[], T], where: str) -> T:
        """Return the result of `work`; repeat the work if the scheduler is lost and comes back."""
        losses = 0
        while True:
            try:
                return work()
            except WorkersError:  # already has its final message; nested work reports a lost scheduler
                raise
            except Exception as error:
                if not _is_lost(self.client, error):
                    raise
                losses += 1
                if losses > _MOST_LOSSES:
                    raise WorkersError(
                        f"{where}: the Dask scheduler was lost {losses} times in this stage; it may lack memory. "
                        "Stored data is safe; continue with `metaloom resume`"
                    ) from error
                self._reopen(where, error)

    def _open(self) -> None:
        self.client: Client = self._opened.enter_context(self._connect())

    def _reopen(self, where: str, lost: Exception) -> None:
        most, began = max(_BACK_SECONDS, no_worker_seconds()), time.monotonic()
        log.warning("%s: the Dask scheduler is gone; waiting up to %.0f s for it to come back", where, most)
        with suppress(OSError):  # such as a connection that does not close in time
            self._opened.close()
        while True:
            try:
                self._open()
                break
            except NobodyThere as error:
                if time.monotonic() - began >= most:
                    raise WorkersError(
                        f"{where}: the Dask scheduler is gone and has not come back for {most:.0f} s: {error}. Stored "
                        "data is safe; continue with `metaloom resume`"
                    ) from lost
        waited = time.monotonic() - began
        log.warning("%s: the Dask scheduler is back after %.0f s; repeating this stage", where, waited)


@contextmanager
def connected(backend: Backend, spec: SamplerSpec, session: str) -> Iterator[Connection]:
    """Yield a connection to the backend's scheduler or to local processes; it is closed after the block."""
    if backend.scheduler is not None:
        connect = partial(_client, backend.scheduler, spec)
    else:
        connect = partial(local_client, backend.workers or 0, backend.retries or 0, session)
    with ExitStack() as opened:
        yield Connection(connect, opened)


@contextmanager
def _client(address: str, spec: SamplerSpec) -> Iterator[Client]:
    try:
        # Dask waits forever for the first message after connecting.
        LoopRunner().run_sync(_require_answer, address)
        client = Client(address, timeout=_ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise NobodyThere(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, or remove --scheduler to use processes on this machine"
        ) from None
    except TypeError as error:  # Dask's message about a missing certificate
        raise WorkersError(
            f"there is no certificate for connecting to {address} ({error}); set Dask's TLS configuration, as in "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE=ca.pem and __CLIENT__CERT, __CLIENT__KEY (docs/scale.md)"
        ) from None
    with client, _watched(client, address):
        try:
            _wait_for_a_worker(client, address)
            _require_same_code(client, spec)
            client.sync(_fetch_from_workers, client, [*cast(Any, client.nthreads())])
            # A worker that leaves during the call makes it fail, although the others have received it.
            with suppress(CommClosedError):
                client.forward_logging()  # forward environments' log records to this process
        except Exception as error:
            if _is_lost(client, error):
                raise NobodyThere(f"the Dask scheduler at {address} has gone away ({error})") from error
            raise
        yield client


async def _require_answer(address: str) -> None:
    security = Security().get_connection_args("client")
    async with rpc(address, timeout=_ANSWER_SECONDS, connection_args=security) as scheduler:
        try:
            # Connecting has the same timeout and gives a better error.
            await asyncio.wait_for(scheduler.identity(n_workers=0), _ANSWER_SECONDS + 1)
        except TimeoutError:
            raise OSError("the server there does not respond: it is suspended, or is not a Dask scheduler") from None
        except MemoryError:  # the first bytes of the reply are read as a message size
            raise OSError("the server there is not a Dask scheduler; it may be its dashboard") from None


async def _fetch_from_workers(client: Client, workers: Sequence[str]) -> None:
    """Make the client fetch episodes directly from workers, unless it can reach only the scheduler."""
    dask = cast(Any, client)
    asked = [dask.rpc(worker).identity() for worker in workers]
    try:
        await asyncio.wait_for(asyncio.gather(*asked), _ANSWER_SECONDS)
    except OSError as error:
        log.info("episodes are fetched through the Dask scheduler, because a worker cannot be reached: %s", error)
    else:
        dask.direct_to_workers = True


@contextmanager
def _watched(client: Client, address: str) -> Iterator[None]:
    """Within the block, close the connections to a scheduler that stops responding, so that calls to it fail."""
    dask = cast(Any, client)

    async def watch() -> None:
        silences = 0
        while silences < _MOST_SILENCES:
            try:
                await asyncio.wait_for(dask.scheduler.identity(n_workers=0), _SILENT_SECONDS)
            except TimeoutError:
                silences += 1
                continue
            except OSError:  # closed, which the client notices
                pass
            silences = 0
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
        log.warning("the Dask scheduler at %s has not answered for %.0f s", address, silences * _SILENT_SECONDS)
        dask.rpc.remove(dask.scheduler.address, reason="it does not answer")
        if dask.scheduler_comm is not None:  # None while it reconnects
            dask.scheduler_comm.abort()

    watching = asyncio.run_coroutine_threadsafe(watch(), dask.loop.asyncio_loop)
    try:
        yield
    finally:
        watching.cancel()


def _is_lost(client: Client, error: Exception) -> bool:
    """Return True if an error means that the scheduler is lost; Dask raises various errors in this case."""
    # One connection may be closed before the client notices that its own is.
    return isinstance(error, CancelledError | CommClosedError) or client.status != "running"


def _require_same_code(client: Client, spec: SamplerSpec) -> None:
    # A run's records contain one set of versions, the trainer's. Workers that join later are checked when they receive
    # their first work.
    answers = cast(dict[str, Any], client.run(check_worker, spec, on_error="return"))
    here, machine_code = fingerprint(spec), dict[str, tuple[str, ...]]()
    for worker, answer in answers.items():
        if isinstance(answer, OSError):  # the worker left during the call
            continue
        if isinstance(answer, ImportError):
            raise _cannot_import(answer) from None
        if isinstance(answer, ConfigError):
            raise WorkersError(f"the Dask worker at {worker} cannot load the run's plug-ins: {answer}") from None
        if isinstance(answer, Exception):
            raise answer
        versions, machine_code[worker] = answer
        require_versions(here, versions, f"at {worker}")
    _warn_other_arithmetic(machine_code)


def _wait_for_a_worker(client: Client, address: str) -> None:
    # Submit work instead of only waiting, since some schedulers start workers on demand.
    probe = client.submit(usable_cores, key=f"is_anybody_there-{secrets.token_hex(8)}", pure=False)
    try:
        wait_for(client, [probe])
        probe.result()
    except ImportError as error:
        raise _cannot_import(error) from None
    except PausedWorkers as error:
        raise NobodyThere(str(error)) from None
    except (WorkersError, NoWorkerError):
        raise NobodyThere(
            f"the Dask scheduler at {address} has no worker; start one with `dask worker {address}`. {LONGER}"
        ) from None
    finally:
        probe.cancel()


def _cannot_import(error: ImportError) -> WorkersError:
    return WorkersError(
        f"a Dask worker cannot import what rollouts need ({error}). Every worker needs the same Metaloom and "
        "environment: install them there, or start the workers in this folder"
    )


def _warn_other_arithmetic(found: Mapping[str, tuple[str, ...]]) -> None:
    """Log one warning about all workers whose CPU code paths may round differently from this process's."""
    here = acting_facts()
    others = {worker: code for worker, code in found.items() if not {*code} <= {*here}}
    if others:
        worker, code = next(iter(others.items()))
        log.warning(
            "%d of %d Dask workers use different CPU code paths from this process, so their digests may differ from "
            "those of other workers and of `metaloom replay`: %s at %s, %s here. Setting OPENBLAS_CORETYPE=Haswell, "
            'ATEN_CPU_CAPABILITY=avx2 and NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR" for the trainer and '
            "every worker makes all x86-64 processors with AVX2 use the same code paths",
            len(others),
            len(found),
            ", ".join(code),
            worker,
            ", ".join(here),
        )
