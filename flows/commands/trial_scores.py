"""Scores of the trials of a search, computed from their stored runs."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np

from metaloom import storage
from metaloom.flows.commands.compare import NoFiniteScore, read_histories
from metaloom.flows.results.sweep import Trial
from metaloom.flows.sweeps.stored import PlannedRun, Sweep
from metaloom.flows.views.run_info import is_complete
from metaloom.pipeline.types import Array


def trials_of(sweep: Sweep) -> list[Trial]:
    """Return the known trials of a search with their stored scores; empty for a grid."""
    if sweep.search is None:
        return []
    known = [runs_of(sweep, number) for number in range(len(sweep.runs) // len(sweep.seeds))]
    return [Trial(number, runs, mean_score(sweep, runs, sweep.search.metric)) for number, runs in enumerate(known)]


def score_of(folder: Path, metric: str) -> float | None:
    """Return the mean of a metric over the last tenth of a run's iterations; None if a value is not finite."""
    run = storage.open_run(folder)
    try:
        _, (history,), _ = read_histories([run], metric, mixed=False)
    except NoFiniteScore:
        return None
    return late_mean(history.iterations, history.values, len(run.iterations))


def late_mean(iterations: Array, values: Array, num_iterations: int) -> float:
    """Return the mean of the values in the last tenth of the iterations, or the last value if there are none.

    Args:
        iterations: Ascending indices of iterations with a value, shape [n].
        values: Values of these iterations, shape [n].
        num_iterations: Number of iterations of the run; a tenth is at least one.
    """
    late = values[iterations >= num_iterations - ceil(num_iterations / 10)]
    return float(np.mean(late)) if len(late) else float(values[-1])


def runs_of(sweep: Sweep, number: int) -> tuple[PlannedRun, ...]:
    """Return the runs of a trial, one per seed."""
    each = len(sweep.seeds)
    return sweep.runs[number * each : (number + 1) * each]


def mean_score(sweep: Sweep, runs: Sequence[PlannedRun], metric: str) -> float | None:
    """Return the mean score of a trial's runs; None unless all are complete and have one."""
    folders = [sweep.folder(run) for run in runs]
    if not all(map(is_complete, folders)):
        return None
    scores = [score_of(folder, metric) for folder in folders]
    finite = [score for score in scores if score is not None]
    return float(np.mean(finite)) if len(finite) == len(scores) else None
