"""Terminal part of `metaloom sweep`: shows progress or the sweep itself, and stops at Ctrl-C."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call
from metaloom.flows.cli.output import answer, say, unless_closed
from metaloom.flows.errors import EXIT_INTERRUPTED
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import refuse_with
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.opened import Runs
    from metaloom.flows.results.sweep import SweepObserver, SweepResult
    from metaloom.flows.sweeps.stored import Sweep


def sweep(
    call: "Call[Runs]",
    *,
    status: Annotated[
        bool, Parameter(help="Train nothing: show what is done. RECIPE is then the name of the sweep.")
    ] = False,
    dry_run: Annotated[bool, Parameter(help="Train nothing: show which runs there would be.")] = False,
    as_json: bool = False,
) -> int:
    """Train a sweep, or show it."""
    if status:
        chosen = {name: call[name] or None for name in ("grid", "optuna", "search", "metric")}
        given = {"seeds": call["seeds"], **chosen, "set": call["overrides"] or None, "name": call["name"]}
        refuse_with("--status", **given, extend=call["extend"])
        return _show(late.require_sweep(call["recipe"]), as_json=as_json)
    shown = (lambda planned, start: _show(planned, as_json=as_json)) if dry_run else partial(_train, as_json)
    return cast(int, call(progress=shown))


def _show(sweep: "Sweep", *, as_json: bool) -> int:
    trials = late.trials_of(sweep)
    rows = late.sweep_rows(sweep, trials)
    about = {"sweep": sweep.name, "recipe": sweep.recipe, "runs": rows}
    answer(as_json, lambda: about | late.search_info(sweep, trials), lambda: late.sweep_table(sweep, rows))
    if not as_json and rows and (lines := late.best_lines(sweep, trials)):
        say(as_json, "\n".join(lines))
    return 0


def _train(as_json: bool, planned: "Sweep", start: "Callable[[SweepObserver], SweepResult]") -> int:
    done = sum(late.is_complete(planned.folder(run)) for run in planned.runs)
    tell = unless_closed(say)
    tell(as_json, f"sweep {planned.name}: {plural(planned.num_runs, 'run')}, {done} complete")
    go_on = f"continue with the same command, or: metaloom sweep {planned.name}"
    STATUS.end()
    with (
        late.stop_on_interrupt(lambda: go_on) as stop,
        late.sweep_progress(
            planned.num_runs, done, "json" if as_json else "auto", stop=stop, out=sys.stdout
        ) as observer,
    ):
        begun, ended = unless_closed(observer.begun), unless_closed(observer.ended)
        result = start(replace(observer, begun=begun, ended=ended))
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
        return 0 if late.best_of(late.trials_of(result.sweep)) is not None else 1
    tell(as_json, f"compare them: metaloom compare {planned.name}")
    return 0
