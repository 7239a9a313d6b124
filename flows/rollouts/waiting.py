"""Wait for work on Dask workers, but not for workers that never come or never begin."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import dask.config
from dask.utils import parse_timedelta
from distributed import Client, Future, wait
from distributed.scheduler import NoWorkerError

from metaloom.flows.errors import WorkersError

__all__ = ["LONGER", "NoWorkerError", "Patience", "PausedWorkers", "no_worker_for", "no_worker_seconds", "wait_for"]

_LOOK_EVERY_SECONDS = 1.0
_NO_WORKER_SECONDS = 60.0


class PausedWorkers(WorkersError):
    """Dask has paused the workers that were to do something, and they do nothing."""


class Patience:
    """Waits as long as there are workers, and for a while without any that does its work or begins it."""

    def __init__(self, client: Client, step_timeout_seconds: float) -> None:
        # A worker that a call of an environment has cut off is ended, and says why, after the step timeout.
        self._client, self._most = client, max(no_worker_seconds(), 2 * step_timeout_seconds)
        self._alone_since: float | None = None

    def any_done(self, futures: Sequence[Future[Any]]) -> bool:
        """Wait a moment for all to be done or to fail; return True if any is.

        It waits for all, because fetching every answer separately takes longer than the work of a short rollout batch.

        Raises:
            WorkersError: there has been no worker for as long as `no_worker_seconds` says, or for two step timeouts.
            PausedWorkers: the remaining workers have been paused for that long.
        """
        with suppress(TimeoutError):
            wait(futures, timeout=_LOOK_EVERY_SECONDS)
        if any(future.done() for future in futures):
            self._alone_since = None
            return True
        workers = cast(dict[str, dict[str, Any]], self._client.scheduler_info(n_workers=-1)["workers"])
        # What a worker had begun before it was paused it also ends.
        begun = {a: w.get("metrics", {}).get("task_counts", {}).get("executing", 0) for a, w in workers.items()}
        paused = {address for address, worker in workers.items() if worker["status"] == "paused" and not begun[address]}
        if workers and not (paused and self._wait_for(futures, paused, len(workers))):
            self._alone_since = None
            return False
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since < self._most:
            return False
        if not workers:
            raise no_worker_for(self._most)
        raise PausedWorkers(
            f"Dask has paused {len(paused)} of {len(workers)} workers for lack of memory, and for {self._most:g} s "
            "they have not begun what they were given; required more memory for each, by `dask worker --memory-limit` "
            "or fewer --workers. What is stored is safe; continue with `metaloom resume`"
        )

    def _wait_for(self, futures: Sequence[Future[Any]], paused: set[str], num_workers: int) -> bool:
        """Return True if all these futures belong to paused workers, whose tasks Dask does not reassign."""
        if len(paused) == num_workers:
            return True
        given = cast(dict[str, tuple[str, ...]], self._client.processing())
        theirs = {key for worker in paused for key in given.get(worker, ())}
        return all(future.key in theirs for future in futures)


def wait_for(client: Client, futures: Sequence[Future[Any]], step_timeout_seconds: float = 0.0) -> None:
    """Wait until one is done or has failed.

    Raises:
        WorkersError: there has been no worker for long.
        PausedWorkers: it has been paused for long.
    """
    patience = Patience(client, step_timeout_seconds)
    while not patience.any_done(futures):
        pass


LONGER = (
    "Where workers take longer to come, give them longer: DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=15m for "
    "scheduler and trainer"
)


def no_worker_for(seconds: float) -> WorkersError:
    """Build the error for a scheduler that has had no worker for `seconds`."""
    return WorkersError(
        f"the Dask scheduler has had no worker for {seconds:g} s; start one with `dask worker`, and continue with "
        f"`metaloom resume`. {LONGER}"
    )


def no_worker_seconds() -> float:
    """Return how long to wait for the first worker, or the next when all have gone: Dask's setting, or a minute."""
    setting = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return _NO_WORKER_SECONDS if setting is None else cast(float, parse_timedelta(setting))
