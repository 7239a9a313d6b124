"""Results of sweeps: outcomes of runs, and scores of trials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from metaloom.flows.observer import IterationReport
from metaloom.flows.sweeps.stored import PlannedRun, Sweep

Ending = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of training a run, with the reason if it was stopped or failed."""

    run: PlannedRun
    ending: Ending
    message: str = ""


@dataclass(frozen=True)
class SweepResult:
    """Outcomes of a sweep's started runs; `stopped` is True if a stop was requested."""

    sweep: Sweep
    outcomes: tuple[RunOutcome, ...]
    stopped: bool

    @property
    def failed(self) -> tuple[RunOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.ending == "failed")


@dataclass(frozen=True)
class SweepObserver:
    """Callbacks during a sweep; the defaults do nothing and never stop the sweep."""

    begun: Callable[[PlannedRun], None] = lambda run: None
    iteration_done: Callable[[PlannedRun, IterationReport], None] = lambda run, report: None
    ended: Callable[[RunOutcome], None] = lambda outcome: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Trial:
    """Search trial with one run per seed; its mean score is None until all runs are complete."""

    number: int
    runs: tuple[PlannedRun, ...]
    score: float | None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the highest score, the first one if tied; None if no trial has a score."""
    scored = [(trial.score, -trial.number, trial) for trial in trials if trial.score is not None]
    return max(scored)[-1] if scored else None
