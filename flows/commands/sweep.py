"""Train all runs of a sweep, one after the other or several at once; what is stored already is not trained again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from metaloom.flows.commands.search import train_trials
from metaloom.flows.commands.sweep_processes import train_runs
from metaloom.flows.commands.sweep_runs import require_own, was_stopped
from metaloom.flows.errors import UsageError
from metaloom.flows.estimate import check_sizes
from metaloom.flows.formatting import plural
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers import LogPlan, check_loggers
from metaloom.flows.results.sweep import SweepObserver, SweepResult
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.plan import check_unchanged, probe_configs
from metaloom.flows.sweeps.stored import Sweep, find_sweep, held
from metaloom.flows.views.run_info import is_complete
from metaloom.pipeline.config.run import RunConfig


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
        configs: settings of its runs; none where they are searched.
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
            return train_trials(known, search, train, observer)
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
