"""Options that several commands share, each described once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.errors import UsageError
from metaloom.flows.loggers import LoggerName, LogPlan, check_loggers
from metaloom.flows.operations.options import RUN_HELP as RUN_HELP
from metaloom.flows.operations.options import agree as agree
from metaloom.flows.operations.options import complete_recipes as complete_recipes
from metaloom.flows.operations.options import complete_runs as complete_runs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from metaloom.flows.observer import Observer
    from metaloom.flows.rollouts.workers import Backend


_AT = "; @-1 or @latest counts from the newest, @best is the one of highest return"
RunArgument = Annotated[str, Parameter(help=RUN_HELP, completer=complete_runs)]
RunAtArgument = Annotated[
    str, Parameter(help=f"RUN, or RUN@ITERATION for one iteration{_AT}. {RUN_HELP}", completer=complete_runs)
]
LearnerArgument = Annotated[
    str,
    Parameter(
        help=f"RUN for its newest learner, RUN@N for the learner after N updates{_AT}. {RUN_HELP}",
        completer=complete_runs,
    ),
]
ParentArgument = Annotated[
    str,
    Parameter(
        help=f"RUN@N to begin with its first N iterations{_AT}; RUN for all of them. {RUN_HELP}",
        completer=complete_runs,
    ),
]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Change a setting: `--set algorithm.inner_lr=0.05`. Repeatable.",
    ),
]
Trust = Annotated[
    bool,
    Parameter(
        negative=(),
        show_default=False,
        help="Import the modules that the run's settings name, now and later: say it of runs that others made, after "
        "you have looked at them.",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), show_default=False, help="Print JSON instead of text.")]
MetricsPort = Annotated[
    int | None,
    Parameter(help="Port at which Prometheus can read the training on this machine: http://127.0.0.1:PORT/metrics."),
]
Repeated = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


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
        from metaloom.flows.rollouts.workers import Backend

        return Backend(self.workers, self.threads, self.scheduler, self.step_timeout, self.retries, self.mathematics)


ANYWHERE = BackendOptions()


@Parameter(name="*")
@dataclass(frozen=True)
class LogOptions:
    """Options that say where else a training is logged.

    Attributes:
        log: Also log to `tensorboard`, `wandb` (offline) or `mlflow`, each an extra of that name. Repeatable.
        film_every: With --log, film every so many iterations, besides the last.
    """

    log: Annotated[tuple[LoggerName, ...], Parameter(negative=(), show_default=False)] = ()
    film_every: int | None = None

    def to(self, folder: Path, observer: "Observer") -> "AbstractContextManager[Observer]":
        """Return what also logs the training of a run; see `metaloom.flows.loggers.logging_to`."""
        from metaloom.flows.loggers.live import logging_to

        return logging_to(self.log, folder, observer, film_every=self.film_every)

    @property
    def plan(self) -> LogPlan:
        """The same for several trainings."""
        return LogPlan(self.log, self.film_every)

    def check(self) -> None:
        """Refuse what could only fail later.

        Raises:
            UsageError: a logger's package is not installed, or options contradict one another.
        """
        if not self.log:
            refuse_without("--log", film_every=self.film_every)
        check_loggers(self.log, self.film_every)


NOWHERE = LogOptions()


def refuse_without(option: str, **others: object) -> None:
    """Refuse options that mean something only together with another one, which was not given."""
    for name in _given(others):
        raise UsageError(f"found --{name} without {option}; add it, or leave this out")


def refuse_with(option: str, **others: object) -> None:
    """Refuse options that mean nothing together with another one."""
    for name in _given(others):
        raise UsageError(f"found --{name} with {option}; leave one of them out")


def _given(options: dict[str, object]) -> list[str]:
    return [name.replace("_", "-") for name, value in options.items() if value is not None and value is not False]
