"""The Python API: train, open, evaluate, replay, fork and question runs from a program or a notebook."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from metaloom.flows.commands import replay as replays
from metaloom.flows.commands import sweep as sweeping
from metaloom.flows.commands import train as training
from metaloom.flows.errors import UsageError
from metaloom.flows.films import video as films
from metaloom.flows.loggers import LoggerName, LogPlan
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.opened import Run, Runs
from metaloom.flows.recipes import RECIPES, new_config
from metaloom.flows.results.sweep import SweepObserver
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import RunLike, folder_of, new_run_name, run_folder
from metaloom.flows.settings import assignments, plain
from metaloom.flows.sweeps.plan import plan_wanted
from metaloom.flows.sweeps.space import wanted_search
from metaloom.flows.views.progress import progress as shown_progress
from metaloom.flows.views.run_info import is_complete
from metaloom.flows.views.sweep_progress import sweep_progress
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config

IN_PROCESS = Backend(workers=0)
"""Rollouts in this process: worker processes need a script that guards its main part."""


def recipes() -> list[str]:
    """Names of all recipes, also those of installed packages."""
    return [*RECIPES]


def train(
    recipe: str | RunConfig,
    run: str | Path | None = None,
    *,
    backend: Backend = IN_PROCESS,
    progress: bool = True,
    log: Sequence[LoggerName] = (),
    film_every: int | None = None,
    **settings: Any,
) -> Run:
    """Train a new run to its last iteration. Whatever interrupts it, `resume` goes on.

        run = metaloom.train("promp-point-corner", iterations=20, algorithm={"inner_lr": 0.2})

    Args:
        recipe: a recipe, a YAML or JSON file of settings, or settings.
        run: name in the runs folder, or path; made from recipe and time when None.
        backend: where rollouts run.
        progress: tell of every iteration on standard output.
        log: where else to log: "tensorboard", "wandb" (offline), "mlflow", each an extra of that name.
        film_every: with `log`, film every so many iterations, besides the last.
        **settings: fields of RunConfig to change; of a section, a mapping of those to change.

    Raises:
        ConfigError, EnvError: a setting is wrong.
        storage.RunExists: there is such a run already.
    """
    if isinstance(recipe, RunConfig):
        given = recipe.model_dump(mode="json", exclude={"env": recipe.env.left_open})
        config = build_config(override(given, assignments(settings)))
    else:
        config = new_config(recipe, assignments(settings))
    stem = config.algorithm.name if isinstance(recipe, RunConfig) else Path(recipe).stem
    path = run_folder(new_run_name(stem) if run is None else run)
    with _observer(progress) as shown, logging_to(log, path, shown, film_every=film_every) as observer:
        training.train(config, path, backend=backend, observer=observer)
    return Run.open(path)


def resume(
    run: RunLike,
    *,
    iterations: int | None = None,
    take_over: bool = False,
    repair: bool = False,
    backend: Backend = IN_PROCESS,
    progress: bool = True,
    log: Sequence[LoggerName] = (),
    film_every: int | None = None,
) -> Run:
    """Go on with a run from its first missing stage, whatever interrupted it.

    Args:
        run: which.
        iterations: how many it shall have; as configured when None.
        take_over: seize the lock of a writer that can no longer release it, such as one on a host that died.
        repair: drop the outputs that `metaloom verify` finds damaged, and compute them again.
        backend: where rollouts run.
        progress: tell of every iteration on standard output.
        log: as in `train`.
        film_every: as in `train`.
    """
    path = folder_of(run)
    with _observer(progress) as shown, logging_to(log, path, shown, film_every=film_every) as observer:
        training.resume(
            path, iterations=iterations, take_over=take_over, repair=repair, backend=backend, observer=observer
        )
    return Run.open(path)


def replay(
    run: RunLike,
    iteration: int | None = None,
    *,
    stage: str | None = None,
    step: int | None = None,
    backend: Backend = IN_PROCESS,
) -> list[replays.StageReplay]:
    """Run stored stages again, and compare every array with what is stored.

    Args:
        run: which.
        iteration: a negative one counts from the end; all complete ones when None.
        stage: only this one.
        step: only this inner step.
        backend: where rollouts run.
    """
    return list(replays.replay(folder_of(run), iteration, stage=stage, step=step, backend=backend))


def _observer(progress: bool) -> AbstractContextManager[training.Observer]:
    return shown_progress() if progress else nullcontext(training.Observer())


def video(run: RunLike, out: str | Path, iteration: int = -1, **options: Any) -> films.Film:
    """Film a stored episode, before and after adaptation side by side.

        metaloom.video("first", "best.gif", task="best")

    Args:
        run: the run.
        out: .gif, .webp, .mp4, or .png for the last picture alone.
        iteration: -1 is the newest.
        **options: of `metaloom.flows.films.video.video`: task, episode, steps, size, every, renderer.

    Raises:
        UsageError: there is no such episode, or it cannot be drawn or written so.
        storage.StageMissing: the iteration's episodes are not stored.
    """
    return films.video(folder_of(run), iteration, Path(out), **options)


def sweep(
    recipe: str,
    name: str | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    optuna: int | None = None,
    search: Mapping[str, str | Sequence[Any]] | None = None,
    metric: str | None = None,
    extend: bool = False,
    many: bool = False,
    parallel: int = 1,
    backend: Backend = IN_PROCESS,
    progress: bool = True,
    log: Sequence[LoggerName] = (),
    film_every: int | None = None,
    **settings: Any,
) -> Runs:
    """Train a recipe under several seeds and all combinations of some settings; the same call goes on with it.

        runs = metaloom.sweep("promp-point-corner", "lr", seeds=5, grid={"algorithm.inner_lr": [0.05, 0.1]})
        metaloom.compare(runs).table().to_pandas()
        runs = metaloom.sweep("promp-point-corner", "best", optuna=20, search={"algorithm.inner_lr": "0.01:1:log"})

    Args:
        recipe: a recipe, or a file of settings.
        name: of the sweep, with which the names of its runs begin; that of the recipe and "-sweep" when None.
        seeds: how many, counted from the recipe's, or which; 5 when None, 1 for each trial of a search.
        grid: values to try, by setting.
        optuna: trials to search for the settings with the highest score; needs the extra `optuna`.
        search: what to search, by setting: a range "LOW:HIGH" or "LOW:HIGH:log", or a list of values.
        metric: what a trial's score is, as the mean over the last tenth of the iterations of its runs: "return" (when
            None), "evaluation", or any metric of the runs.
        extend: add runs to a stored sweep: the same settings with more seeds or more values, or more trials.
        many: allow more than a thousand runs.
        parallel: runs to train at once, each in a process of its own; needs a script that guards its main part.
        backend: where rollouts of each run run.
        progress: tell of every run on standard output.
        log: loggers that every run is logged to, such as tensorboard.
        film_every: film so many iterations apart, for the loggers.
        **settings: fields of RunConfig that all runs have; see train.

    Returns:
        Its runs; of a search those that are complete, with the trials in order.

    Raises:
        ConfigError, EnvError, UsageError: settings are wrong, or the stored sweep of this name has others; nothing was
            begun. Or a run failed, in a search all of them; the others are trained all the same.
    """
    values = {key: [_text_of(value) for value in found] for key, found in (grid or {}).items()}
    space = {
        key: _text_of(found) if isinstance(found, str) else ",".join(map(_text_of, found))
        for key, found in (search or {}).items()
    }
    wanted, given = wanted_search(optuna, space, metric, grid), assignments(settings)
    planned, configs = plan_wanted(recipe, name, search=wanted, grid=values, seeds=seeds, settings=given, many=many)
    done = sum(is_complete(planned.folder(run)) for run in planned.runs)
    shown = sweep_progress(planned.num_runs, done) if progress else nullcontext(SweepObserver())
    with shown as observer:
        logs = LogPlan(tuple(log), film_every)
        result = sweeping.train_sweep(
            planned, configs, extend=extend, parallel=parallel, backend=backend, observer=observer, logs=logs
        )
    complete = [run for run in result.sweep.runs if is_complete(planned.folder(run))]
    if result.failed and (wanted is None or not complete):
        told = "; ".join(f"{outcome.run.name}: {outcome.message}" for outcome in result.failed)
        raise UsageError(f"sweep {planned.name}: {len(result.failed)} runs failed. {told}. The same call tries again")
    return Runs([Run.open(planned.folder(run)) for run in complete])


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=plain)
