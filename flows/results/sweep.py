"""Outcomes of a sweep's runs, and scores of its trials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from metaloom.flows.observer import IterationReport
from metaloom.flows.sweeps.stored import PlannedRun, Sweep

Ending = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of training a run: complete, stopped, or failed, with the reason."""

    run: PlannedRun
    ending: Ending
    message: str = ""


@dataclass(frozen=True)
class SweepResult:
    """Result of training a sweep: the outcomes of started runs, and True if a stop was requested."""

    sweep: Sweep
    outcomes: tuple[RunOutcome, ...]
    stopped: bool

    @property
    def failed(self) -> tuple[RunOutcome, ...]:
        """Outcomes of the runs that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.ending == "failed")


@dataclass(frozen=True)
class SweepObserver:
    """Callbacks during a sweep; by default they do nothing and never stop it."""

    begun: Callable[[PlannedRun], None] = lambda run: None
    iteration_done: Callable[[PlannedRun, IterationReport], None] = lambda run, report: None
    ended: Callable[[RunOutcome], None] = lambda outcome: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: Trial number, from 0.
        runs: Runs of the trial, one per seed.
        score: Mean score of its runs; None until all are complete.
    """

    number: int
    runs: tuple[PlannedRun, ...]
    score: float | None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the (first) trial with the highest score; None if no trial has a score."""
    scored = [(trial.score, -trial.number, trial) for trial in trials if trial.score is not None]
    return max(scored)[-1] if scored else None
