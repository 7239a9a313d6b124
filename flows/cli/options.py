"""Options that only commands have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from metaloom.flows.rollouts.backend import Backend

AsJson = Annotated[bool, Parameter(name="--json", negative=(), show_default=False, help="Print JSON instead of text.")]
Repeated = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class BackendOptions:
    """Options that say where rollouts run.

    Attributes:
        workers: Dask worker processes on this machine; 0 samples in this process. By default none for a replay or a
            run of one task, otherwise two.
        threads: Physics threads when sampling in this process (`--workers 0`).
        scheduler: Address of a running Dask scheduler, `tcp://host:port` or `tls://host:port`.
        step_timeout: Seconds that one call of an environment may take before its worker gives up; 60 by default.
        retries: How many times to redo work whose worker process died; 3 by default.
        mathematics: Where samples are processed, tasks adapted and updates computed: `here`, by `workers`, or `auto`:
            by a scheduler's workers if these have more threads than there are cores here.
    """

    workers: int | None = None
    threads: int = 1
    scheduler: str | None = None
    step_timeout: float | None = None
    retries: int | None = None
    mathematics: Literal["auto", "here", "workers"] = "auto"

    def backend(self) -> "Backend":
        """Return the backend that these options describe.

        Raises:
            UsageError: they contradict one another.
        """
        from metaloom.flows.rollouts.backend import Backend

        return Backend(self.workers, self.threads, self.scheduler, self.step_timeout, self.retries, self.mathematics)


ANYWHERE = BackendOptions()
