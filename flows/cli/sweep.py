"""`metaloom sweep`."""

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import (
    ANYWHERE,
    NOWHERE,
    AsJson,
    BackendOptions,
    Flag,
    LogOptions,
    Overrides,
    complete_recipes,
    refuse_with,
)
from metaloom.flows.cli.output import answer, say, unless_closed
from metaloom.flows.errors import EXIT_INTERRUPTED, UsageError
from metaloom.flows.loggers import LogPlan
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.flows.sweeps.stored import Sweep
    from metaloom.pipeline.config.run import RunConfig

Grid = Annotated[
    tuple[str, ...],
    Parameter(
        negative=(),
        show_default=False,
        help="Try several values: `--grid algorithm.inner_lr=0.05,0.1`. Repeatable: all combinations.",
    ),
]

Space = Annotated[
    tuple[str, ...],
    Parameter(
        name="--search",
        negative=(),
        show_default=False,
        help="Search a range or a list of values, with `--optuna`: `--search algorithm.inner_lr=0.01:0.3:log`, "
        "`algorithm.num_epochs=1:10` for whole numbers, `policy.activation=tanh,relu`. Repeatable.",
    ),
]


def sweep(
    recipe: Annotated[
        str,
        Parameter(
            completer=complete_recipes,
            help="A recipe or a file of settings; or the name of a stored sweep, to go on with it.",
        ),
    ],
    *,
    seeds: str | None = None,
    grid: Grid = (),
    optuna: int | None = None,
    search: Space = (),
    metric: str | None = None,
    overrides: Overrides = (),
    name: str | None = None,
    parallel: int = 1,
    extend: Flag = False,
    status: Flag = False,
    dry_run: Flag = False,
    yes: Flag = False,
    where: BackendOptions = ANYWHERE,
    also: LogOptions = NOWHERE,
    as_json: AsJson = False,
) -> int:
    """Train a recipe under several seeds and settings.

    Every combination is a run.

    With `--optuna` and `--search` each trial's settings are suggested by the scores of the trials before it.

    Whatever interrupts it, the same command goes on: runs that are complete are not trained again. Ctrl-C finishes
    the current stages. Which runs there are is kept in `sweeps/NAME.json` in the runs folder. Exit code 1 when a run
    failed, of a search when all trials did; the others are trained all the same.

    Example: `metaloom sweep promp-point-corner --seeds 2 --grid algorithm.inner_lr=0.05,0.1 --set iterations=2`

    Args:
        seeds: How many, counted from the recipe's seed (5 by default, 1 with `--optuna`), or which: `1,2,7`.
        optuna: Trials to search for the settings with the highest score. Needs the extra `optuna`.
        metric: What the score is, as the mean over the last tenth of the iterations of each of a trial's runs: `return`
            after adaptation (by default), `evaluation`, or any metric that `metaloom show` lists.
        name: Name of the sweep, with which the names of its runs begin; RECIPE-sweep by default.
        parallel: Runs to train at once, each in a process of its own; these sample in their processes by default.
        extend: Add runs to a stored sweep: the same settings with more seeds or more values, or more trials.
        status: Train nothing: show what is done. RECIPE is then the name of the sweep.
        dry_run: Train nothing: show which runs there would be.
        yes: Do not refuse a sweep of more than a thousand runs.
    """
    from metaloom.flows.sweeps.stored import require_sweep

    chosen = {"seeds": seeds, "grid": grid or None, "optuna": optuna, "search": search or None, "metric": metric}
    chosen |= {"set": overrides or None, "name": name}
    if status:
        refuse_with("--status", **chosen, extend=extend)
        return _show(require_sweep(recipe), as_json=as_json)
    also.check()
    backend = where.backend()
    planned, configs = (None, []) if any(value is not None for value in chosen.values()) else _stored(recipe)
    if planned is None:
        from metaloom.flows.sweeps.plan import plan_wanted
        from metaloom.flows.sweeps.space import parse_grid, parse_space, wanted_search

        wanted, values = wanted_search(optuna, parse_space(search), metric, grid), parse_grid(grid)
        planned, configs = plan_wanted(
            recipe, name, search=wanted, grid=values, seeds=_seeds(seeds), settings=overrides, many=yes
        )
    if dry_run:
        return _show(planned, as_json=as_json)
    return _train(planned, configs, as_json, parallel=parallel, extend=extend, backend=backend, logs=also.plan)


def _stored(name: str) -> "tuple[Sweep | None, list[RunConfig]]":
    """The stored sweep of this name, unless it is the name of a recipe or file."""
    from metaloom.flows.recipes import RECIPES, is_settings_file
    from metaloom.flows.sweeps.stored import find_sweep

    found = None if name in RECIPES or is_settings_file(name) or "/" in name else find_sweep(name)
    if found is not None and found.search is not None:
        found.require_trust()
        return found, []
    return found, [] if found is None else found.configs()


def _seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    if not re.fullmatch(r"\d{1,19}(,\d{1,19})*,?", text):
        raise UsageError(f"found --seeds {text}; required how many, such as 5, or which, such as 1,2,7")
    return [int(part) for part in text.removesuffix(",").split(",")]


def _show(sweep: "Sweep", *, as_json: bool) -> int:
    from metaloom.flows.commands.trial_scores import trials_of
    from metaloom.flows.views.sweep_tables import best_lines, search_info, sweep_rows, sweep_table

    trials = trials_of(sweep)
    rows = sweep_rows(sweep, trials)
    about = {"sweep": sweep.name, "recipe": sweep.recipe, "runs": rows}
    answer(as_json, lambda: about | search_info(sweep, trials), lambda: sweep_table(sweep, rows))
    if not as_json and rows and (lines := best_lines(sweep, trials)):
        say(as_json, "\n".join(lines))
    return 0


def _train(
    planned: "Sweep",
    configs: "list[RunConfig]",
    as_json: bool,
    *,
    parallel: int,
    extend: bool,
    backend: "Backend",
    logs: LogPlan,
) -> int:
    from metaloom.flows.commands.sweep import train_sweep
    from metaloom.flows.commands.trial_scores import trials_of
    from metaloom.flows.formatting import plural
    from metaloom.flows.interrupt import stop_on_interrupt
    from metaloom.flows.results.sweep import best_of
    from metaloom.flows.views.run_info import is_complete
    from metaloom.flows.views.sweep_progress import sweep_progress

    done = sum(is_complete(planned.folder(run)) for run in planned.runs)
    tell = unless_closed(say)
    tell(as_json, f"sweep {planned.name}: {plural(planned.num_runs, 'run')}, {done} complete")
    go_on = f"go on with the same command, or: metaloom sweep {planned.name}"
    STATUS.end()
    with (
        stop_on_interrupt(lambda: go_on) as stop,
        sweep_progress(planned.num_runs, done, "json" if as_json else "auto", stop=stop, out=sys.stdout) as observer,
    ):
        told = replace(observer, begun=unless_closed(observer.begun), ended=unless_closed(observer.ended))
        result = train_sweep(
            planned, configs, extend=extend, parallel=parallel, backend=backend, observer=told, logs=logs
        )
    if result.stopped:
        tell(as_json, f"stopped; {go_on}")
        return EXIT_INTERRUPTED
    if result.failed:
        lines = [f"failed  {outcome.run.name}  {outcome.message}" for outcome in result.failed]
        tell(as_json, "\n".join([*lines, f"the same command tries again: metaloom sweep {planned.name}"]))
        if planned.search is None:
            return 1
    if not as_json:
        _show(result.sweep, as_json=False)
    if planned.search is not None:
        return 0 if best_of(trials_of(result.sweep)) is not None else 1
    tell(as_json, f"compare them: metaloom compare {planned.name}")
    return 0
