"""Worker processes on this machine that only their trainer can reach and that leave no processes or files behind."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import dask.config
from distributed import Client, LocalCluster, Nanny, Security, Worker
from distributed.comm.core import CommClosedError
from distributed.core import Status

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.guard import MARK, end_marked
from metaloom.flows.signals import kept_from_children

LOOPBACK = "127.0.0.1"
_SETTINGS = {
    # Dask opens HTTP ports on all interfaces even without a dashboard. Their routes need no certificate, so anybody
    # could read the scheduler's state and retire workers.
    "distributed.scheduler.http.routes": [],
    # On a busy machine, restarting a worker may take longer than Dask's limit of 15 seconds.
    "distributed.deploy.lost-worker-timeout": "1 hour",
}

_endings: dict[int, int] = {}
_ended = threading.Condition()


class LocalWorker(Worker):
    """Worker that does not log failed heartbeats, which are expected while the trainer shuts down."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        logging.getLogger("distributed.worker").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # On a busy machine, a heartbeat is often pending during shutdown, and Dask logs a traceback (distributed #7105).
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, CommClosedError) and "heartbeat" in record.getMessage())


class MarkedNanny(Nanny):
    """Nanny in this process that starts its worker with the session's mark and records how the worker ended."""

    _starting: ClassVar[int] = 0
    _before: ClassVar[dict[str, str | None]] = {}

    def __init__(self, *args: Any, mark: str, **options: Any) -> None:
        super().__init__(*args, worker_class=LocalWorker, **options)
        self.pre_spawn_env[MARK] = mark
        self._worker = 0

    async def instantiate(self) -> Status:
        if not MarkedNanny._starting:
            MarkedNanny._before = {name: os.environ.get(name) for name in self.pre_spawn_env}
        MarkedNanny._starting += 1
        try:
            return await super().instantiate()
        finally:
            self._worker = self.pid or 0
            MarkedNanny._starting -= 1
            # Dask sets variables (the mark, one thread, the hash seed) in this process's environment. Other child
            # processes must not inherit them.
            if not MarkedNanny._starting:
                for name, value in MarkedNanny._before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def _on_worker_exit_sync(self, exitcode: int) -> None:
        with _ended:
            _endings[self._worker] = exitcode
            _ended.notify_all()
        super()._on_worker_exit_sync(exitcode)


def ending_of(pid: int) -> str | None:
    """Return a description of how a worker process ended, or None if unknown."""
    with _ended:
        _ended.wait_for(lambda: pid in _endings, timeout=2)
        code = _endings.get(pid)
    if code is None:
        return None
    if code >= 0:
        return f"with exit status {code}, as by os._exit"
    name = signal.Signals(-code).name
    return f"by {name}{', from outside or for lack of memory' if name == 'SIGKILL' else ''}"


@contextmanager
def local_client(workers: int, retries: int, mark: str) -> Iterator[Client]:
    """Start worker processes and yield their client; the processes and their descendants end with the block."""
    # Only these processes hold this certificate, in memory: a scheduler executes anything it receives.
    security = Security.temporary()
    try:
        with (
            # Ignore the user's Dask configuration for other clusters: an idle-timeout would close this one.
            dask.config.set(distributed=dask.config.merge(*dask.config.defaults)["distributed"]),
            dask.config.set(_SETTINGS),
            _cluster(workers, retries, mark, security) as cluster,
            Client(cluster, security=security, direct_to_workers=True) as client,
        ):
            client.forward_logging()  # forward environments' log records to this process
            yield client
    finally:
        end_marked(mark)


def _cluster(workers: int, retries: int, mark: str, security: Security) -> LocalCluster:
    # A terminal sends these signals to its whole process group. Workers inherit the mask that blocks them, even when
    # they are restarted later.
    with kept_from_children(signal.SIGINT, signal.SIGHUP):
        try:
            return LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host=LOOPBACK,
                security=security,
                worker_class=MarkedNanny,
                mark=mark,
                config={"distributed.worker.http.routes": []},
                dashboard_address=f"{LOOPBACK}:0",
                worker_dashboard_address=f"{LOOPBACK}:0",
                scheduler_kwargs={"dashboard": False, "allowed_failures": retries},
            )
        except RuntimeError as error:
            raise WorkersError(
                f"the worker processes did not start ({error}); they may lack memory. Use fewer, or --workers 0"
            ) from error
