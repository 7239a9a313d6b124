"""The trials of a search: suggested one after the other, and trained as runs of the sweep."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from metaloom.flows.commands.run_scores import AFTER_ADAPTATION, EVALUATION
from metaloom.flows.commands.sweep_runs import Job, require_own, was_stopped
from metaloom.flows.commands.trial_scores import mean_score, runs_of, score_of
from metaloom.flows.observer import IterationReport
from metaloom.flows.results.sweep import Outcome, SweepObserver, SweepResult
from metaloom.flows.sweeps.plan import trial_runs
from metaloom.flows.sweeps.space import Search
from metaloom.flows.sweeps.stored import PlannedRun, Sweep
from metaloom.flows.sweeps.suggestions import require_optuna, suggest
from metaloom.flows.views.run_info import is_complete
from metaloom.pipeline.schema import ConfigError


class TrainRuns(Protocol):
    """Trains runs, and returns how those ended that were begun."""

    def __call__(self, jobs: Sequence[Job], *, observer: SweepObserver) -> list[Outcome]: ...


def train_trials(sweep: Sweep, search: Search, train: TrainRuns, observer: SweepObserver) -> SweepResult:
    """Train what is missing of the trials that are known, then suggest and train all others.

    Every trial is written into the sweep's file before it is trained, and the study is made anew of the stored scores
    for every suggestion, so a search that was killed goes on with the trials that it would have had.

    Raises:
        UsageError: the runs have no such metric, or a run of a name that is needed is none of this sweep.
        ExtraMissing: Optuna is not installed.
    """
    require_optuna()
    told: list[tuple[dict[str, str], float | None]] = []
    outcomes: list[Outcome] = []
    if sweep.runs:
        sweep.write()  # there may be more trials than before
    for number in range(search.trials):
        if number * len(sweep.seeds) == len(sweep.runs):
            point = suggest(search, told, sweep.seeds[0])
            sweep = replace(sweep, runs=sweep.runs + trial_runs(sweep, point))
            sweep.write()
        runs = runs_of(sweep, number)
        ended, stopped = _train_trial(sweep, runs, search.metric, train, observer)
        outcomes += ended
        if stopped:
            return SweepResult(sweep, tuple(outcomes), stopped=True)
        told.append((dict(runs[0].settings), mean_score(sweep, runs, search.metric)))
    return SweepResult(sweep, tuple(outcomes), stopped=False)


def _train_trial(
    sweep: Sweep, runs: Sequence[PlannedRun], metric: str, train: TrainRuns, observer: SweepObserver
) -> tuple[list[Outcome], bool]:
    """Train what is missing of a trial: how its runs ended, and whether all was asked to stop."""
    jobs: list[Job] = []
    failed: list[Outcome] = []
    for run in runs:
        folder = sweep.folder(run)
        try:
            config = sweep.config(run)
        except ConfigError as problem:
            if run.digest:
                raise
            failed.append(Outcome(run, "failed", str(problem)))
            observer.begun(run)
            observer.ended(failed[-1])
            continue
        require_own(sweep, run, config)
        if not is_complete(folder):
            jobs.append((run, config, folder))
    watching, without = _watching_for(metric, observer)
    outcomes = train(jobs, observer=watching)
    for run in without:
        score_of(sweep.folder(run), metric)  # which says that there is no such metric, and which there are
    return failed + outcomes, was_stopped(jobs, outcomes)


def _watching_for(metric: str, observer: SweepObserver) -> tuple[SweepObserver, list[PlannedRun]]:
    """An observer that stops at a first iteration without the metric, and the runs that it stopped for."""
    if metric in (AFTER_ADAPTATION, EVALUATION):
        return observer, []
    without: list[PlannedRun] = []

    def iteration_done(run: PlannedRun, report: IterationReport) -> None:
        if metric not in report.metrics:
            without.append(run)
        observer.iteration_done(run, report)

    should_stop: Callable[[], bool] = lambda: bool(without) or observer.should_stop()  # noqa: E731
    return replace(observer, iteration_done=iteration_done, should_stop=should_stop), without
