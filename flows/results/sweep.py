"""Runs and trials of a sweep: how they ended, and their scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from metaloom.flows.observer import IterationReport
from metaloom.flows.sweeps.stored import PlannedRun, Sweep

Ending = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of the work on one run: complete, stopped in order, or failed, with the reason."""

    run: PlannedRun
    ending: Ending
    message: str = ""


@dataclass(frozen=True)
class SweepResult:
    """A sweep after work on it: how each run ended that was worked on, and whether all was asked to stop."""

    sweep: Sweep
    outcomes: tuple[Outcome, ...]
    stopped: bool

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The runs that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.ending == "failed")


@dataclass(frozen=True)
class SweepObserver:
    """Callbacks during a sweep; by default they do nothing and never stop it."""

    begun: Callable[[PlannedRun], None] = lambda run: None
    iteration_done: Callable[[PlannedRun, IterationReport], None] = lambda run, report: None
    ended: Callable[[Outcome], None] = lambda outcome: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: Trial number, from 0.
        runs: One run of every seed.
        score: Mean of its runs' scores; None until all are complete.
    """

    number: int
    runs: tuple[PlannedRun, ...]
    score: float | None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the highest score, the first of several; None where none has a score."""
    scored = [(trial.score, -trial.number, trial) for trial in trials if trial.score is not None]
    return max(scored)[-1] if scored else None
