"""Train all runs of a sweep, one after the other or several at once; what is stored already is not trained again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from metaloom import storage
from metaloom.flows.commands import train as training
from metaloom.flows.commands.sweep_processes import train_at_once
from metaloom.flows.commands.sweep_runs import Outcome, SweepObserver, train_or_resume
from metaloom.flows.errors import UsageError
from metaloom.flows.estimate.limits import check_sizes
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers import LogPlan, check_loggers
from metaloom.flows.observer import Observer
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps import PlannedRun, Sweep, check_unchanged, find_sweep, held
from metaloom.flows.views.run_info import state_of
from metaloom.pipeline.config.run import RunConfig


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
    """Train what is missing of a sweep. Whatever interrupts it, the same call goes on.

    Args:
        sweep: the plan.
        configs: settings of its runs.
        extend: whether the plan may have more runs than the stored sweep of this name.
        parallel: runs to train at once, each in a process of its own.
        backend: where rollouts of each run run.
        observer: is told of progress, and may ask to stop.
        logs: where else every run is logged.

    Raises:
        UsageError: a logger cannot be used, the stored sweep has something else, another process works on it, or a run
            of a name that is needed is none of this sweep.
        ConfigError, EnvError: settings of a run cannot be used.
    """
    if parallel < 1:
        raise UsageError(f"found --parallel {parallel}; required 1 or more")
    check_loggers(logs.names, logs.film_every)
    if parallel > 1 and backend.workers is None and backend.scheduler is None:
        backend = replace(backend, workers=0)  # the processes of the runs are enough
    with held(sweep):
        stored = find_sweep(sweep.name)
        if stored is not None:
            check_unchanged(stored, sweep, extend=extend)
        by_run = dict(zip((run.name for run in sweep.runs), configs, strict=True))
        for run in sweep.runs:
            _require_own(sweep, run, by_run[run.name])
        if stored is None or len(stored.runs) < len(sweep.runs):
            _try_settings(sweep, by_run, backend)
            sweep.write()
        todo = [run for run in sweep.runs if not is_complete(sweep.folder(run))]
        if parallel == 1:
            outcomes = _one_by_one(sweep, todo, by_run, backend, observer, logs)
        else:
            # What depends on this process's folder and environment is settled here: others may have begun elsewhere.
            jobs = [(run, pinned(by_run[run.name]), sweep.folder(run).absolute()) for run in todo]
            outcomes = train_at_once(jobs, parallel, backend, observer, logs)
        return SweepResult(sweep, tuple(outcomes), stopped=len(outcomes) < len(todo) or _any_stopped(outcomes))


def is_complete(folder: Path) -> bool:
    """Tell whether a run has all its iterations."""
    if not storage.run_exists(folder):
        return False
    return state_of(storage.open_run(folder), None) == "complete"


def _one_by_one(
    sweep: Sweep,
    todo: Sequence[PlannedRun],
    configs: Mapping[str, RunConfig],
    backend: Backend,
    observer: SweepObserver,
    logs: LogPlan,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for run in todo:
        if observer.should_stop():
            break
        observer.begun(run)
        told = Observer(iteration_done=partial(observer.iteration_done, run), should_stop=observer.should_stop)
        outcome = Outcome(run, *train_or_resume(configs[run.name], sweep.folder(run), backend, told, logs))
        outcomes.append(outcome)
        observer.ended(outcome)
    return outcomes


def _any_stopped(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.ending == "stopped" for outcome in outcomes)


def _require_own(sweep: Sweep, run: PlannedRun, config: RunConfig) -> None:
    """Refuse a run that has the name of one of the sweep and other settings."""
    folder = sweep.folder(run)
    if not storage.run_exists(folder):
        return
    found = storage.open_run(folder)
    if found.info["config_digest"] != training.recorded(pinned(config)).digest():
        raise UsageError(
            f"{folder}: found a run of other settings than the sweep {sweep.name} has for this name; required that of "
            "the sweep, or none. Begin a sweep of another --name, or `metaloom rm` the run"
        )


def _try_settings(sweep: Sweep, configs: Mapping[str, RunConfig], backend: Backend) -> None:
    """Build what each combination of settings trains with, which finds what settings alone do not show."""
    first: dict[tuple[tuple[str, str], ...], PlannedRun] = {}
    for run in sweep.runs:
        first.setdefault(tuple(run.settings.items()), run)
    for run in first.values():
        config = pinned(configs[run.name])
        check = partial(check_sizes, config, sweep.folder(run), backend)
        with stages_of(config, Backend(workers=0), check) as stages:
            stages.context.learner.initialize(run_seed=config.seed)
