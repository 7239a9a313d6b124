"""Train all runs of a sweep, one after the other or several at once; what is stored already is not trained again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from metaloom.flows.commands.run_scores import AFTER_ADAPTATION, EVALUATION
from metaloom.flows.commands.sweep_runs import Job, require_own, train_runs, was_stopped
from metaloom.flows.commands.trial_scores import mean_score, runs_of, score_of
from metaloom.flows.errors import UsageError
from metaloom.flows.estimate import check_sizes
from metaloom.flows.formatting import plural
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers import LogPlan, check_loggers
from metaloom.flows.observer import IterationReport
from metaloom.flows.results.sweep import Outcome, SweepObserver, SweepResult
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.plan import check_unchanged, probe_configs, trial_runs
from metaloom.flows.sweeps.space import Search, require_optuna
from metaloom.flows.sweeps.stored import PlannedRun, Sweep, find_sweep, held
from metaloom.flows.views.run_info import is_complete
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.schema import ConfigError


def train_sweep(
    sweep: Sweep,
    configs: Sequence[RunConfig],
    *,
    extend: bool = False,
    parallel: int = 1,
    backend: Backend = Backend(),
    observer: SweepObserver = SweepObserver(),
    logs: LogPlan = LogPlan(),
) -> SweepResult:
    """Train the missing runs of a sweep. After an interruption, the same call continues it."""
    if sweep.search is not None and parallel > len(sweep.seeds):
        raise UsageError(
            f"found --parallel {parallel} of a search whose trials are {plural(len(sweep.seeds), 'run')} each; "
            "required at most that, because every trial is suggested by the scores of those before it"
        )
    check_loggers(logs.names, logs.film_every)
    if parallel > 1 and backend.workers is None and backend.scheduler is None:
        backend = replace(backend, workers=0)  # the processes of the runs are enough
    with held(sweep):
        stored = find_sweep(sweep.name)
        if stored is not None:
            check_unchanged(stored, sweep, extend=extend)
        train = partial(train_runs, parallel=parallel, backend=backend, logs=logs)
        if sweep.search is not None:
            if stored is None:
                _try_settings(probe_configs(sweep, sweep.search))
            known, search = sweep, sweep.search
            if stored is not None and stored.search is not None:
                # Suggestions depend on the order of the settings, which the command may give in another one.
                search = replace(search, space=stored.search.space)
                known = replace(sweep, runs=stored.runs, search=search)
            return _train_trials(known, search, train, observer)
        by_run = dict(zip((run.name for run in sweep.runs), configs, strict=True))
        for run in sweep.runs:
            require_own(sweep, run, by_run[run.name])
        if stored is None or len(stored.runs) < len(sweep.runs):
            first = {tuple(run.settings.items()): by_run[run.name] for run in reversed(sweep.runs)}
            _try_settings([*first.values()])
            sweep.write()
        jobs = [(run, by_run[run.name], folder) for run in sweep.runs if not is_complete(folder := sweep.folder(run))]
        outcomes = train(jobs, observer=observer)
        return SweepResult(sweep, tuple(outcomes), was_stopped(jobs, outcomes))


def _try_settings(configs: Sequence[RunConfig]) -> None:
    """Build what each combination of settings trains with, which finds what settings alone do not show."""
    for config in map(pinned, configs):
        with stages_of(config, Backend(workers=0), partial(check_sizes, config)) as stages:
            stages.context.try_learner()


class TrainRuns(Protocol):
    """Trains runs, and returns how those ended that were begun."""

    def __call__(self, jobs: Sequence[Job], *, observer: SweepObserver) -> list[Outcome]: ...


def _train_trials(sweep: Sweep, search: Search, train: TrainRuns, observer: SweepObserver) -> SweepResult:
    """Train the missing runs of known trials, then suggest and train all other trials.

    Every trial is written into the sweep's file before it is trained. For every suggestion, the study is rebuilt from
    the stored scores. A search that was killed therefore continues with the trials that it would have had.
    """
    require_optuna()
    from metaloom.flows.sweeps.suggestions import suggest  # which needs it

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
