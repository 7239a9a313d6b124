"""Waiting for work on Dask workers, but not for workers that will never come."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import dask.config
from dask.utils import parse_timedelta
from distributed import Client, Future, wait
from distributed.scheduler import NoWorkerError

from metaloom.flows.errors import WorkersError

__all__ = ["LONGER", "NoWorkerError", "Patience", "no_worker_for", "no_worker_seconds", "wait_for"]

_LOOK_EVERY_SECONDS = 1.0
_NO_WORKER_SECONDS = 60.0


class Patience:
    """Waits as long as there are workers, and for a while without any."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._alone_since: float | None = None

    def any_done(self, futures: Sequence[Future[Any]]) -> bool:
        """Wait a moment for all to be done or to fail; tell if any is.

        For all: to fetch every answer by itself takes longer than the work of a short round.

        Raises:
            WorkersError: there has been no worker for as long as `no_worker_seconds` says.
        """
        with suppress(TimeoutError):
            wait(futures, timeout=_LOOK_EVERY_SECONDS)
        if not any(future.done() for future in futures):
            self._require_workers()
            return False
        self._alone_since = None
        return True

    def _require_workers(self) -> None:
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            self._alone_since = None
            return
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since >= (most := no_worker_seconds()):
            raise no_worker_for(most)


def wait_for(client: Client, futures: Sequence[Future[Any]]) -> None:
    """Wait until one is done or has failed.

    Raises:
        WorkersError: there has been no worker for long.
    """
    patience = Patience(client)
    while not patience.any_done(futures):
        pass


LONGER = (
    "Where workers take longer to come, give them longer: DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=15m for "
    "scheduler and trainer"
)


def no_worker_for(seconds: float) -> WorkersError:
    """The error for a scheduler that has had no worker for so long."""
    return WorkersError(
        f"the Dask scheduler has had no worker for {seconds:g} s; start one with `dask worker`, and go on with "
        f"`metaloom resume`. {LONGER}"
    )


def no_worker_seconds() -> float:
    """How long to wait for the first worker, or for the next when all have gone: Dask's setting, or a minute."""
    setting = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return _NO_WORKER_SECONDS if setting is None else cast(float, parse_timedelta(setting))
