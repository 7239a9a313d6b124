"""Training the incomplete runs of a sweep, in sequence or in parallel, and scoring trials."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from math import ceil
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread

import numpy as np

from metaloom import storage
from metaloom.flows.commands import train as training
from metaloom.flows.commands.compare import AFTER_ADAPTATION, EVALUATION, NoFiniteScore, read_histories
from metaloom.flows.errors import UsageError, exit_code
from metaloom.flows.estimate import check_sizes
from metaloom.flows.formatting import plural
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.results.sweep import Ending, RunOutcome, SweepObserver, SweepResult, Trial
from metaloom.flows.rollouts.guard import note_requested_end
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.signals import kept_from_children
from metaloom.flows.sweeps.plan import check_unchanged, probe_configs, trial_runs
from metaloom.flows.sweeps.space import Search, require_optuna
from metaloom.flows.sweeps.stored import PlannedRun, Sweep, find_sweep, held
from metaloom.flows.views.run_info import is_complete
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array


def trials_of(sweep: Sweep) -> list[Trial]:
    """Return the known trials of a search with their scores; empty for a grid."""
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
    """Return the mean of the values in the last tenth of a run's iterations, or the last value if there are none."""
    late = values[iterations >= num_iterations - ceil(num_iterations / 10)]
    return float(np.mean(late)) if len(late) else float(values[-1])


def runs_of(sweep: Sweep, number: int) -> tuple[PlannedRun, ...]:
    """Return the runs of a trial, one per seed."""
    each = len(sweep.seeds)
    return sweep.runs[number * each : (number + 1) * each]


def mean_score(sweep: Sweep, runs: Sequence[PlannedRun], metric: str) -> float | None:
    """Return the mean score of a trial's runs; None unless all runs are complete and have finite scores."""
    folders = [sweep.folder(run) for run in runs]
    if not all(map(is_complete, folders)):
        return None
    scores = [score_of(folder, metric) for folder in folders]
    finite = [score for score in scores if score is not None]
    return float(np.mean(finite)) if len(finite) == len(scores) else None


Job = tuple[PlannedRun, RunConfig, Path]  # run to train, with its settings and its folder
Logging = Callable[[Path, Observer], AbstractContextManager[Observer]]
"""Function that wraps a run's observer so that the run is also logged, such as `logging_to` with bound loggers."""
UNLOGGED: Logging = partial(logging_to, ())

LOOK_SECONDS = 0.2
_ALLOCATOR = "JE_ARROW_MALLOC_CONF"
_FOR_ALL = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def train_runs(
    jobs: Sequence[Job], observer: SweepObserver, *, parallel: int, backend: Backend, logged: Logging
) -> list[RunOutcome]:
    """Train runs, up to `parallel` at a time, until a stop is requested; return the outcomes of all started runs."""
    outcomes: list[RunOutcome] = []
    if parallel == 1:
        for run, config, folder in jobs:
            if observer.should_stop():
                break
            observer.begun(run)
            watching = Observer(iteration_done=partial(observer.iteration_done, run), should_stop=observer.should_stop)
            outcomes.append(RunOutcome(run, *_train_or_resume(config, folder, backend, watching, logged)))
            observer.ended(outcomes[-1])
        return outcomes
    # Resolve what depends on the working directory and environment variables, which may differ in other processes.
    waiting = [(run, pinned(config), folder.absolute()) for run, config, folder in jobs]
    context = multiprocessing.get_context("forkserver")
    # Preload numerics, so that forked processes need not import it again.
    context.set_forkserver_preload([__name__])
    # Otherwise Arrow's allocator starts a thread in the process that is forked.
    if is_default := _ALLOCATOR not in os.environ:
        os.environ[_ALLOCATOR] = "background_thread:false"
    # Keep signals from the children until they install their own handlers.
    try:
        with kept_from_children(*_FOR_ALL):
            forkserver.ensure_running()
    finally:
        if is_default:
            del os.environ[_ALLOCATOR]
    stop, working = context.Event(), dict[Connection, tuple[PlannedRun, ForkServerProcess]]()
    try:
        while working or (waiting and not stop.is_set()):
            if observer.should_stop():
                stop.set()
            while waiting and len(working) < parallel and not stop.is_set():
                run, config, folder = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                work = (config, folder, backend, stop, sender, logged)
                process = context.Process(target=_work, args=work, name=run.name)
                process.start()
                sender.close()  # otherwise the pipe would not end with the process
                working[receiver] = run, process
                observer.begun(run)
            for receiver in wait([*working], LOOK_SECONDS):
                assert isinstance(receiver, Connection)
                run, process = working[receiver]
                try:
                    message: IterationReport | tuple[Ending, str] | None = receiver.recv()
                except EOFError:
                    message = None
                if isinstance(message, IterationReport):
                    observer.iteration_done(run, message)
                    continue
                process.join()
                lost = f"its process ended with exit code {process.exitcode}; see `metaloom logs`"
                del working[receiver]
                outcomes.append(RunOutcome(run, *(message or ("failed", lost))))
                observer.ended(outcomes[-1])
    finally:
        stop.set()
        for _, process in working.values():
            process.join()
    return outcomes


def _work(config: RunConfig, folder: Path, backend: Backend, stop: Event, sender: Connection, logged: Logging) -> None:
    """Train or resume a run in this child process; send its reports, then how it ended, to the parent process."""
    for number in _FOR_ALL:
        # Child processes inherit ignored signals but no handlers, so SIGTERM still ends them.
        signal.signal(number, (lambda *_: None) if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ALL)
    Thread(target=_end_with_parent, args=(stop,), daemon=True).start()

    def iteration_done(report: IterationReport) -> None:
        with suppress(BrokenPipeError):
            sender.send(report)

    observer = Observer(iteration_done=iteration_done, should_stop=stop.is_set)
    sender.send(_train_or_resume(config, folder, backend, observer, logged))


def _end_with_parent(stop: Event) -> None:
    """Wait for the parent process to end, even by kill -9, then end this one. Committed outputs are kept."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if stop.is_set():
        note_requested_end()
    os._exit(1)


def _train_or_resume(
    config: RunConfig, folder: Path, backend: Backend, observer: Observer, logged: Logging
) -> tuple[Ending, str]:
    """Train or resume a run; return how it ended, and the message of an expected error."""
    try:
        with logged(folder, observer) as watching:
            if storage.run_exists(folder):
                result = training.resume(folder, backend=backend, observer=watching)
            else:
                result = training.train(config, folder, backend=backend, observer=watching)
    except Exception as error:  # a failed run must not end the others; bugs are still shown
        if exit_code(error) is None:
            raise
        return "failed", str(error)
    return ("stopped" if result.stopped else "complete"), ""


def was_stopped(jobs: Sequence[Job], outcomes: Sequence[RunOutcome]) -> bool:
    """Return True if a stop was requested before all runs had ended."""
    return len(outcomes) < len(jobs) or any(outcome.ending == "stopped" for outcome in outcomes)


def require_own(sweep: Sweep, run: PlannedRun, config: RunConfig) -> None:
    """Raise UsageError if a run with this name exists but its settings differ from those in the sweep."""
    folder = sweep.folder(run)
    if not storage.run_exists(folder):
        return
    found = storage.open_run(folder)
    config = config.model_copy(update={"env": config.env.as_in(found.config["env"])})
    if found.info["config_digest"] != training.recorded(pinned(config)).digest():
        raise UsageError(
            f"{folder}: the run's settings differ from its settings in the sweep {sweep.name}. "
            "Start a sweep with a different --name, or remove the run with `metaloom rm`"
        )


def train_sweep(
    sweep: Sweep,
    configs: Sequence[RunConfig],
    *,
    extend: bool = False,
    parallel: int = 1,
    backend: Backend = Backend(),
    observer: SweepObserver = SweepObserver(),
    logged: Logging = UNLOGGED,
) -> SweepResult:
    """Train the missing runs of a sweep. After an interruption, the same call continues it."""
    if sweep.search is not None and parallel > len(sweep.seeds):
        raise UsageError(
            f"--parallel is {parallel}, but each trial of the search has {plural(len(sweep.seeds), 'run')}; "
            "use at most that many, because each trial is suggested from the scores of earlier trials"
        )
    if parallel > 1 and backend.workers is None and backend.scheduler is None:
        backend = replace(backend, workers=0)  # the runs' processes are enough
    with held(sweep):
        if (stored := find_sweep(sweep.name)) is not None:
            check_unchanged(stored, sweep, extend=extend)
        train = partial(train_runs, parallel=parallel, backend=backend, logged=logged)
        if sweep.search is not None:
            if stored is None:
                _try_settings(probe_configs(sweep, sweep.search))
            known, search = sweep, sweep.search
            if stored is not None and stored.search is not None:
                # Suggestions depend on the order of settings, which may differ in the command.
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
        outcomes = train(jobs, observer)
        return SweepResult(sweep, tuple(outcomes), was_stopped(jobs, outcomes))


def _try_settings(configs: Sequence[RunConfig]) -> None:
    """Build the learner for each combination of settings, to find errors before training."""
    for config in map(pinned, configs):
        with stages_of(config, Backend(workers=0), partial(check_sizes, config)) as stages:
            stages.try_learner()


TrainRuns = Callable[[Sequence[Job], SweepObserver], list[RunOutcome]]
"""Function that trains runs and returns the outcomes of all started runs."""


def _train_trials(sweep: Sweep, search: Search, train: TrainRuns, observer: SweepObserver) -> SweepResult:
    """Train the missing runs of known trials, then suggest and train new trials.

    Every trial is written to the sweep's file before it is trained, and the study is rebuilt from stored scores for
    each suggestion, so that a killed search continues with the same trials.
    """
    require_optuna()
    from metaloom.flows.sweeps.suggestions import suggest  # needs Optuna

    scored: list[tuple[dict[str, str], float | None]] = []
    outcomes: list[RunOutcome] = []
    if sweep.runs:
        sweep.write()  # the number of trials may have grown
    for number in range(search.trials):
        if number * len(sweep.seeds) == len(sweep.runs):
            sweep = replace(sweep, runs=sweep.runs + trial_runs(sweep, suggest(search, scored, sweep.seeds[0])))
            sweep.write()
        runs = runs_of(sweep, number)
        ended, stopped = _train_trial(sweep, runs, search.metric, train, observer)
        outcomes += ended
        if stopped:
            return SweepResult(sweep, tuple(outcomes), stopped=True)
        scored.append((dict(runs[0].settings), mean_score(sweep, runs, search.metric)))
    return SweepResult(sweep, tuple(outcomes), stopped=False)


def _train_trial(
    sweep: Sweep, runs: Sequence[PlannedRun], metric: str, train: TrainRuns, observer: SweepObserver
) -> tuple[list[RunOutcome], bool]:
    """Train the missing runs of a trial; return their outcomes, and True if a stop was requested."""
    jobs: list[Job] = []
    failed: list[RunOutcome] = []
    for run in runs:
        try:
            config = sweep.config(run)
        except ConfigError as problem:
            if run.digest:
                raise
            failed.append(RunOutcome(run, "failed", str(problem)))
            observer.begun(run)
            observer.ended(failed[-1])
            continue
        require_own(sweep, run, config)
        if not is_complete(folder := sweep.folder(run)):
            jobs.append((run, config, folder))
    without: list[PlannedRun] = []

    def iteration_done(run: PlannedRun, report: IterationReport) -> None:
        if metric not in (AFTER_ADAPTATION, EVALUATION, *report.metrics):
            without.append(run)
        observer.iteration_done(run, report)

    def should_stop() -> bool:
        return bool(without) or observer.should_stop()

    outcomes = train(jobs, replace(observer, iteration_done=iteration_done, should_stop=should_stop))
    for run in without:
        score_of(sweep.folder(run), metric)  # raises an error that lists the existing metrics
    return failed + outcomes, was_stopped(jobs, outcomes)
