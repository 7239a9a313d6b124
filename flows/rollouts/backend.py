"""Settings of the rollout backend. This module imports neither numerical libraries nor Dask."""

from dataclasses import dataclass, replace

from metaloom.flows.errors import UsageError

DEFAULT_WORKERS = 2
DEFAULT_STEP_TIMEOUT_SECONDS = 60.0
DEFAULT_RETRIES = 3


@dataclass(frozen=True)
class Backend:
    """Settings of the rollout backend.

    A run with one task uses two workers if `step_timeout_seconds` or `retries` is set. Each Dask worker has one physics
    thread. If an environment exceeds the timeout, its worker is killed and the run ends. Sampling in this process has
    no timeout, so that it can be debugged. With a running scheduler, configure its
    `distributed.scheduler.allowed-failures` instead of `retries`.

    Attributes:
        workers: Number of Dask worker processes on this machine; 0 samples in this process. The default is 0 for
            replays, evaluations and runs with one task, otherwise 2.
        threads: Number of physics threads when sampling in this process (`--workers 0`).
        scheduler: Address of a running Dask scheduler, `tcp://host:port` or `tls://host:port`.
        step_timeout_seconds: Timeout in seconds for a single environment call; the default is 60.
        retries: Maximum number of retries for work whose worker process died; the default is 3.
    """

    workers: int | None = None
    threads: int = 1
    scheduler: str | None = None
    step_timeout_seconds: float | None = None
    retries: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.scheduler is not None:
            raise UsageError(
                f"got workers={self.workers} and scheduler={self.scheduler}; use only one of them, since a "
                "scheduler already has workers"
            )
        timeout, retries = self.step_timeout_seconds, self.retries
        if (timeout is not None and not 0 < timeout < float("inf")) or (retries is not None and retries < 0):
            found = f"got {timeout} and {retries}"
            raise UsageError(f"step_timeout_seconds must be a finite number above 0 and retries at least 0, {found}")
        if self.workers == 0 and (timeout is not None or retries is not None):
            raise UsageError(
                f"got step_timeout_seconds={timeout} and retries={retries} without worker processes; use "
                "--workers 1 or more, since this process can neither end nor survive an environment that hangs or "
                "crashes"
            )
        if self.scheduler is not None and retries is not None:
            raise UsageError(
                f"got retries={retries} with a scheduler; use the scheduler's own setting, as in "
                f"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES={retries} where `dask scheduler` is started"
            )
        if (self.workers or 0) < 0 or self.threads < 1:
            raise UsageError(
                f"got workers={self.workers} and threads={self.threads}; expected workers >= 0 (0: sample in this "
                "process) and threads >= 1"
            )
        if self.threads > 1 and self.workers != 0:
            raise UsageError(
                f"got threads={self.threads} with Dask workers, which have one thread each; use --workers 0 to "
                "sample with several threads in this process, or remove --threads"
            )

    def for_tasks(self, num_tasks: int) -> "Backend":
        """Return a copy of the backend with all defaults resolved for a run with `num_tasks` tasks."""
        timeout, retries, workers = self.step_timeout_seconds, self.retries, self.workers
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
"""Backend for rollouts in this process; with worker processes, scripts would need a `__main__` guard."""


@dataclass
class Traffic:
    """Totals of the traffic between a session and its workers, and the workers' thread counts."""

    submitted: int = 0  # shards sent to workers, including retries
    repeated: int = 0  # shards sent again because their worker died
    sent_bytes: int = 0  # size of the parameters and tasks sent to workers
    received_bytes: int = 0  # size of the episodes received from workers
    threads: int = 0  # current total number of worker threads
