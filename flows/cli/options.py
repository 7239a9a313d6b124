"""Options that several commands share, each described once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.errors import UsageError

if TYPE_CHECKING:
    from metaloom.flows.rollouts.workers import Backend

RunArgument = Annotated[
    str, Parameter(help="A name under the runs folder, a path, or a URL such as s3://bucket/runs/first.")
]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative=(), help="Change a setting: `--set algorithm.inner_lr=0.05`. Repeatable."),
]
Trust = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Import the modules that the run's settings name, now and later: say it of runs that others made, after "
        "you have looked at them.",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of text.")]
Flag = Annotated[bool, Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True)
class BackendOptions:
    """Where rollouts run.

    Attributes:
        workers: Dask worker processes on this machine; 0 samples in this process. Left out: none to replay, or for a
            run of one task, else two.
        threads: Physics threads when sampling in this process (`--workers 0`).
        scheduler: Address of a running Dask scheduler, `tcp://host:port`.
        step_timeout: Seconds a worker waits for one call of an environment before it gives up; 60 if left out.
        retries: How often work is done again whose worker process died; 3 if left out.
    """

    workers: int | None = None
    threads: int = 1
    scheduler: str | None = None
    step_timeout: float | None = None
    retries: int | None = None

    def backend(self) -> "Backend":
        """Return the backend that these options describe.

        Raises:
            UsageError: they contradict one another.
        """
        from metaloom.flows.rollouts.workers import Backend

        return Backend(self.workers, self.threads, self.scheduler, self.step_timeout, self.retries)


ANYWHERE = BackendOptions()


def agree(run: Path, trust: bool) -> None:
    """Remember, if the user says so, that what a run's settings name may be imported."""
    if trust:
        from metaloom.flows.trust import trust_run

        trust_run(run)


def refuse_without(option: str, **others: object) -> None:
    """Refuse options that mean something only together with another one, which was not given."""
    for name in _given(others):
        raise UsageError(f"found --{name} without {option}; add it, or leave this out")


def refuse_with(option: str, **others: object) -> None:
    """Refuse options that mean nothing together with another one."""
    for name in _given(others):
        raise UsageError(f"found --{name} with {option}; leave one of them out")


def _given(options: dict[str, object]) -> list[str]:
    return [name.replace("_", "-") for name, value in options.items() if value not in (None, False)]
