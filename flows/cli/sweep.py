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
from metaloom.flows.errors import UsageError
from metaloom.flows.loggers import LogPlan

if TYPE_CHECKING:
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.flows.sweeps import Sweep
    from metaloom.pipeline.config.run import RunConfig

Grid = Annotated[
    tuple[str, ...],
    Parameter(
        negative=(),
        show_default=False,
        help="Try several values: `--grid algorithm.inner_lr=0.05,0.1`. Repeatable: all combinations.",
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
    """Train a recipe under several seeds and all combinations of some settings, each as a run of its own.

    Whatever interrupts it, the same command goes on: runs that are complete are not trained again. Ctrl-C finishes
    the current stages. Which runs there are is kept in `sweeps/NAME.json` in the runs folder. Exit code 1 when a run
    failed; the others are trained all the same.

    Example: `metaloom sweep promp-point-corner --seeds 2 --grid algorithm.inner_lr=0.05,0.1 --set iterations=2`

    Args:
        seeds: How many, counted from the recipe's seed (5 by default), or which: `1,2,7`.
        name: Name of the sweep, with which the names of its runs begin; RECIPE-sweep by default.
        parallel: Runs to train at once, each in a process of its own; these sample in their processes by default.
        extend: Add runs to a stored sweep: the same settings with more seeds or more values.
        status: Train nothing: show what is done. RECIPE is then the name of the sweep.
        dry_run: Train nothing: show which runs there would be.
        yes: Do not refuse a sweep of more than a thousand runs.
    """
    from metaloom.flows.sweeps import plan, require_sweep

    if status:
        refuse_with("--status", seeds=seeds, grid=grid or None, set=overrides or None, name=name, extend=extend)
        return _show(require_sweep(recipe), as_json=as_json)
    also.check()
    backend = where.backend()
    planned, configs = _stored(recipe) if seeds is None and not grid and not overrides and name is None else (None, [])
    if planned is None:
        from metaloom.flows.views.comparison_tables import parse_grid

        values = {key: tuple(texts) for key, texts in parse_grid(grid).items()}
        planned, configs = plan(recipe, name, seeds=_seeds(seeds), grid=values, settings=overrides, many=yes)
    if dry_run:
        return _show(planned, as_json=as_json)
    return _train(planned, configs, as_json, parallel=parallel, extend=extend, backend=backend, logs=also.plan)


def _stored(name: str) -> "tuple[Sweep | None, list[RunConfig]]":
    """The stored sweep of this name, unless it is the name of a recipe or file."""
    from metaloom.flows.recipes import RECIPES, is_settings_file
    from metaloom.flows.sweeps import find_sweep

    found = None if name in RECIPES or is_settings_file(name) or "/" in name else find_sweep(name)
    return found, [] if found is None else found.configs()


def _seeds(text: str | None) -> int | list[int]:
    if text is None:
        return 5
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    if not re.fullmatch(r"\d{1,19}(,\d{1,19})*,?", text):
        raise UsageError(f"found --seeds {text}; required how many, such as 5, or which, such as 1,2,7")
    return [int(part) for part in text.removesuffix(",").split(",")]


def _show(sweep: "Sweep", *, as_json: bool) -> int:
    from metaloom.flows.views.sweep_tables import sweep_rows, sweep_table

    rows = sweep_rows(sweep)
    answer(
        as_json, lambda: {"sweep": sweep.name, "recipe": sweep.recipe, "runs": rows}, lambda: sweep_table(sweep, rows)
    )
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
    from metaloom.flows.commands.sweep import is_complete, train_sweep
    from metaloom.flows.interrupt import EXIT_INTERRUPTED, stop_on_interrupt
    from metaloom.flows.views.formatting import plural
    from metaloom.flows.views.sweep_progress import sweep_progress

    done = sum(is_complete(planned.folder(run)) for run in planned.runs)
    tell = unless_closed(say)
    tell(as_json, f"sweep {planned.name}: {plural(len(planned.runs), 'run')}, {done} complete")
    with (
        stop_on_interrupt() as should_stop,
        sweep_progress(
            len(planned.runs), done, "json" if as_json else "auto", should_stop=should_stop, out=sys.stdout
        ) as observer,
    ):
        told = replace(observer, begun=unless_closed(observer.begun), ended=unless_closed(observer.ended))
        result = train_sweep(
            planned, configs, extend=extend, parallel=parallel, backend=backend, observer=told, logs=logs
        )
    if result.stopped:
        tell(as_json, f"stopped; go on with the same command, or: metaloom sweep {planned.name}")
        return EXIT_INTERRUPTED
    if result.failed:
        lines = [f"failed  {outcome.run.name}  {outcome.message}" for outcome in result.failed]
        tell(as_json, "\n".join([*lines, f"the same command tries again: metaloom sweep {planned.name}"]))
        return 1
    if not as_json:
        _show(planned, as_json=False)
    tell(as_json, f"compare them: metaloom compare {planned.name}")
    return 0
