"""One run of a sweep: how work on it is watched, and how it ends."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metaloom import storage
from metaloom.flows.commands import train as training
from metaloom.flows.errors import exit_code
from metaloom.flows.loggers import LogPlan
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps import PlannedRun
from metaloom.pipeline.config.run import RunConfig

Ending = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How the work on one run ended: complete, stopped in order, or failed, with the reason."""

    run: PlannedRun
    ending: Ending
    message: str = ""


@dataclass(frozen=True)
class SweepObserver:
    """Callbacks of whoever watches a sweep; by default they do nothing and never stop it."""

    begun: Callable[[PlannedRun], None] = lambda run: None
    iteration_done: Callable[[PlannedRun, IterationReport], None] = lambda run, report: None
    ended: Callable[[Outcome], None] = lambda outcome: None
    should_stop: Callable[[], bool] = lambda: False


def train_or_resume(
    config: RunConfig, folder: Path, backend: Backend, observer: Observer, logs: LogPlan
) -> tuple[Ending, str]:
    """Train a run from where it stands; an error that its message explains is how it ended."""
    try:
        with logging_to(logs.names, folder, observer, film_every=logs.film_every) as watching:
            if storage.run_exists(folder):
                result = training.resume(folder, backend=backend, observer=watching)
            else:
                result = training.train(config, folder, backend=backend, observer=watching)
    except Exception as error:  # one run's failure must not end the others; what is a bug still shows itself
        if exit_code(error) is None:
            raise
        return "failed", str(error)
    return ("stopped" if result.stopped else "complete"), ""
