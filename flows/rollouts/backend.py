"""The choice of a backend for rollouts. Imports neither numerics nor Dask."""

from dataclasses import dataclass, replace
from typing import Literal

from metaloom.flows.errors import UsageError

Mathematics = Literal["here", "auto", "workers"]
"""Values of earlier versions; `auto` means `here`, and `workers` is rejected."""

DEFAULT_WORKERS = 2
DEFAULT_STEP_TIMEOUT_SECONDS = 60.0
DEFAULT_RETRIES = 3


@dataclass(frozen=True)
class Backend:
    """Choice of a backend for rollouts.

    A run of one task has two workers if `step_timeout_seconds` or `retries` is set. Dask workers have one physics
    thread each. An environment that exceeds the timeout ends its worker and the run; sampling in this process has no
    timeout, for debugging. For a running scheduler, configure `distributed.scheduler.allowed-failures` there instead of
    `retries`.

    Attributes:
        workers: Dask worker processes on this machine; 0 samples in this process. By default 0 for replays, evaluations
            and runs of one task, otherwise 2.
        threads: Physics threads when sampling in this process (`--workers 0`).
        scheduler: Address of a running Dask scheduler, `tcp://host:port` or `tls://host:port`.
        step_timeout_seconds: Timeout in seconds for one call of an environment; 60 by default.
        retries: Maximum number of retries of work whose worker process died; 3 by default.
        mathematics: No effect; kept for earlier versions.
    """

    workers: int | None = None
    threads: int = 1
    scheduler: str | None = None
    step_timeout_seconds: float | None = None
    retries: int | None = None
    mathematics: Mathematics = "here"

    def __post_init__(self) -> None:
        if self.mathematics == "workers":
            raise UsageError(
                "found mathematics=workers, which this version does not have: wherever it was measured, the trainer "
                "computed updates faster than workers; remove it"
            )
        if self.workers is not None and self.scheduler is not None:
            raise UsageError(
                f"found workers={self.workers} and scheduler={self.scheduler}; required one of them: a scheduler has "
                "its workers already"
            )
        self._check_supervision()
        if (self.workers or 0) < 0 or self.threads < 1:
            raise UsageError(
                f"found workers={self.workers} and threads={self.threads}; required workers >= 0 (0 samples in this "
                "process) and threads >= 1"
            )
        if self.threads > 1 and self.workers != 0:
            raise UsageError(
                f"found threads={self.threads} with Dask workers, which have one thread each; required --workers 0 for "
                "sampling with several threads in this process, or no --threads"
            )

    def _check_supervision(self) -> None:
        timeout, retries = self.step_timeout_seconds, self.retries
        if (timeout is not None and not 0 < timeout < float("inf")) or (retries is not None and retries < 0):
            raise UsageError(
                f"found step_timeout_seconds={timeout} and retries={retries}; required seconds > 0 and retries >= 0"
            )
        if self.workers == 0 and (timeout is not None or retries is not None):
            raise UsageError(
                f"found step_timeout_seconds={timeout} and retries={retries} without worker processes; required "
                "--workers 1 or more for them: this process can neither end nor survive an environment that hangs or "
                "crashes it"
            )
        if self.scheduler is not None and retries is not None:
            raise UsageError(
                f"found retries={retries} with a scheduler; required its own setting, as in "
                f"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES={retries} where `dask scheduler` is started"
            )

    def for_tasks(self, num_tasks: int) -> "Backend":
        """Resolve the defaults for a run of `num_tasks` tasks."""
        timeout, retries = self.step_timeout_seconds, self.retries
        workers = self.workers
        if workers is None and self.scheduler is None:
            workers = 0 if num_tasks == 1 and timeout is None and retries is None else DEFAULT_WORKERS
        if workers == 0:
            return replace(self, workers=0)
        if retries is None and self.scheduler is None:
            retries = DEFAULT_RETRIES
        timeout = DEFAULT_STEP_TIMEOUT_SECONDS if timeout is None else timeout
        return replace(self, workers=workers, step_timeout_seconds=timeout, retries=retries)

    def __str__(self) -> str:
        if self.scheduler is not None:
            return f"Dask scheduler {self.scheduler}"
        if self.workers != 0:
            return f"{self.workers or DEFAULT_WORKERS} Dask worker processes"
        return f"this process, {self.threads} physics thread{'s' if self.threads > 1 else ''}"


IN_PROCESS = Backend(workers=0)
"""Rollouts in this process; worker processes would require scripts to guard their main part."""


@dataclass
class Traffic:
    """Totals of a session's traffic with workers.

    Attributes:
        submitted: Shards sent to workers, including retries.
        repeated: Shards sent again because the worker that had them died.
        sent_bytes, received_bytes: Bytes of parameters and tasks sent, and of episodes received.
        threads: Total number of worker threads now.
    """

    submitted: int = 0
    repeated: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    threads: int = 0
