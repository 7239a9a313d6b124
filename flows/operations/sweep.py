"""`sweep`: trains a recipe with several seeds and settings."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import FilmEvery, Log, Overrides, Positive, PythonOnly, changes, complete_recipes
from metaloom.flows.operations.train import Shown, check_log
from metaloom.flows.rollouts.backend import IN_PROCESS, Backend

if TYPE_CHECKING:
    from metaloom.flows.opened import Runs
    from metaloom.flows.results.sweep import SweepObserver, SweepResult
    from metaloom.flows.sweeps.stored import Sweep
    from metaloom.pipeline.config.run import RunConfig

Seeds = str | Annotated[int, PythonOnly] | Annotated[Sequence[int], PythonOnly] | None


@checked
def sweep(
    recipe: Annotated[
        str,
        Parameter(
            completer=complete_recipes,
            help="A recipe or a settings file, or the name of a stored sweep to continue.",
        ),
    ],
    name: Annotated[str | None, Parameter(name="--name")] = None,
    *,
    seeds: Seeds = None,
    grid: Annotated[
        Sequence[str] | Annotated[Mapping[str, Sequence[Any]], PythonOnly],
        Parameter(help="Try several values: `--grid algorithm.inner_lr=0.05,0.1`. Repeatable: all combinations."),
    ] = (),
    optuna: Positive | None = None,
    search: Annotated[
        Sequence[str] | Annotated[Mapping[str, str | Sequence[Any]], PythonOnly],
        Parameter(
            help="Search a range or a list of values, with `--optuna`: `--search algorithm.inner_lr=0.01:0.3:log`, "
            "`algorithm.num_epochs=1:10` for integers, `policy.activation=tanh,relu`. Repeatable."
        ),
    ] = (),
    metric: str | None = None,
    overrides: Overrides = (),
    parallel: Positive = 1,
    extend: bool = False,
    many: Annotated[bool, Parameter(name="--yes")] = False,
    backend: Backend = IN_PROCESS,
    log: Log = (),
    film_every: FilmEvery = None,
    progress: Shown = True,
    **settings: Any,
) -> "Runs":
    """Train a recipe with several seeds and settings.

    Every combination is a run. With `--optuna` and `--search`, each trial's settings depend on the scores so far.

    After an interruption, the same command continues the sweep without repeating complete runs. Ctrl-C stops it after
    the current stages. `sweeps/NAME.json` in the runs folder lists the runs. Exit code 1 if a run failed, or if all
    trials of a search failed; the other runs are still trained.

    Example: `metaloom sweep promp-point-corner --seeds 2 --grid algorithm.inner_lr=0.05,0.1 --set iterations=2`

    Args:
        recipe: A recipe, a settings file, or a stored sweep.
        name: Name of the sweep and prefix of its runs' names; RECIPE-sweep by default.
        seeds: Number of seeds, starting at the recipe's seed (5 by default, 1 with `--optuna`), or a list: `1,2,7`.
        grid: Values to try for each setting.
        optuna: Number of trials in the search for the highest-scoring settings. Requires the extra `optuna`.
        search: Search space for each setting: a range "LOW:HIGH" or "LOW:HIGH:log", or a list of values.
        metric: Metric used as a trial's score, averaged over the last tenth of each run's iterations: `return` after
            adaptation (the default), `evaluation`, or any metric that `metaloom show` lists.
        overrides: Settings to change, as KEY=VALUE.
        parallel: Number of runs to train at once, each in a separate process that also samples by default.
        extend: Add runs to a stored sweep: the same settings with more seeds or more values, or more trials.
        many: Allow a sweep of more than a thousand runs.
        backend: Rollout backend.
        log: Additional loggers for each run; see `train`.
        film_every: With `log`, number of iterations between videos; the last iteration always has one.
        progress: Print the progress of each run.
        **settings: Settings to change in all runs; see `train`.

    Returns:
        The sweep's runs; for a search, only the complete runs, in the order of trials.

    Raises:
        ConfigError, EnvError, UsageError: Settings are invalid or differ from the stored sweep of this name, and no run
            was started; or a run failed, or all runs of a search failed, after the others were trained.
    """
    check_log(log, film_every)
    settings_given = changes(overrides, settings)
    planned, configs = planned_sweep(
        recipe, name, seeds, grid=grid, optuna=optuna, search=search, metric=metric, settings=settings_given, many=many
    )

    def start(observer: "SweepObserver") -> "SweepResult":
        how: dict[str, Any] = {"extend": extend, "parallel": parallel, "backend": backend}
        logged = partial(late.logging_to, tuple(log), film_every=film_every)
        return late.train_sweep(planned, configs, **how, observer=observer, logged=logged)

    if callable(progress):
        return progress(planned, start)
    done = sum(late.is_complete(planned.folder(run)) for run in planned.runs)
    with late.sweep_progress(planned.num_runs, done) if progress else nullcontext(late.SweepObserver()) as observer:
        result = start(observer)
    complete = [run for run in result.sweep.runs if late.is_complete(planned.folder(run))]
    if result.failed and (planned.search is None or not complete):
        failures = "; ".join(f"{outcome.run.name}: {outcome.message}" for outcome in result.failed)
        failed = plural(len(result.failed), "run")
        raise UsageError(f"sweep {planned.name}: {failed} failed. {failures}. Repeat it to try again")
    return late.Runs([late.Run.open(planned.folder(run)) for run in complete])


def planned_sweep(
    recipe: str,
    name: str | None,
    seeds: Seeds,
    *,
    grid: Sequence[str] | Mapping[str, Sequence[Any]],
    optuna: int | None,
    search: Sequence[str] | Mapping[str, str | Sequence[Any]],
    metric: str | None,
    settings: Sequence[str],
    many: bool,
) -> "tuple[Sweep, list[RunConfig]]":
    """Return a planned sweep, or the stored one if only its name is given, and its configurations ([] for a search)."""
    if (seeds, optuna, metric, name) == (None, None, None, None) and not (grid or search or settings):
        # A recipe or file takes precedence over a sweep of the same name.
        is_other = recipe in late.RECIPES or late.is_settings_file(recipe) or "/" in recipe
        if (found := None if is_other else late.find_sweep(recipe)) is not None:
            if found.search is None:
                return found, found.configs()
            found.require_trust()
            return found, []
    if isinstance(grid, Mapping):
        values = {key: [_text(value) for value in tried] for key, tried in grid.items()}
    else:
        values = late.parse_grid(grid)
    if isinstance(search, Mapping):
        space = {key: where if isinstance(where, str) else ",".join(map(_text, where)) for key, where in search.items()}
    else:
        space = late.parse_space(search)
    wanted = late.wanted_search(optuna, space, metric, grid)
    numbers = _seeds(seeds) if isinstance(seeds, str) else seeds
    numbers = (5 if wanted is None else 1) if numbers is None else numbers
    if wanted is None:
        return late.plan(recipe, name, seeds=numbers, grid=values, settings=settings, many=many)
    return late.plan_search(recipe, name, search=wanted, seeds=numbers, settings=settings, many=many), []


def _seeds(text: str) -> int | list[int]:
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    if not re.fullmatch(r"\d{1,19}(,\d{1,19})*,?", text):
        raise UsageError(f"--seeds {text}: expected a number of seeds, such as 5, or a list, such as 1,2,7")
    return [int(part) for part in text.removesuffix(",").split(",")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=late.plain)
