"""Runs of a sweep: how work on them is watched, and how they end."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from metaloom import storage
from metaloom.flows.commands import train as training
from metaloom.flows.errors import UsageError, exit_code
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers import LogPlan
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.observer import Observer
from metaloom.flows.results.sweep import Ending, Outcome, SweepObserver
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.stored import PlannedRun, Sweep
from metaloom.pipeline.config.run import RunConfig

Job = tuple[PlannedRun, RunConfig, Path]
"""A run to train, its settings and its folder."""


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


def train_one_by_one(jobs: Sequence[Job], backend: Backend, observer: SweepObserver, logs: LogPlan) -> list[Outcome]:
    """Train runs one after the other, until asked to stop."""
    outcomes: list[Outcome] = []
    for run, config, folder in jobs:
        if observer.should_stop():
            break
        observer.begun(run)
        told = Observer(iteration_done=partial(observer.iteration_done, run), should_stop=observer.should_stop)
        outcome = Outcome(run, *train_or_resume(config, folder, backend, told, logs))
        outcomes.append(outcome)
        observer.ended(outcome)
    return outcomes


def was_stopped(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> bool:
    """Tell whether work on runs was asked to stop before all of them had ended."""
    return len(outcomes) < len(jobs) or any(outcome.ending == "stopped" for outcome in outcomes)


def require_own(sweep: Sweep, run: PlannedRun, config: RunConfig) -> None:
    """Refuse a run that has the name of one of the sweep and other settings.

    Raises:
        UsageError: there is one.
    """
    folder = sweep.folder(run)
    if not storage.run_exists(folder):
        return
    found = storage.open_run(folder)
    config = config.model_copy(update={"env": config.env.as_in(found.config["env"])})
    if found.info["config_digest"] != training.recorded(pinned(config)).digest():
        raise UsageError(
            f"{folder}: found a run of other settings than the sweep {sweep.name} has for this name; required that of "
            "the sweep, or none. Begin a sweep of another --name, or `metaloom rm` the run"
        )
