"""Terminal output of `train`, `resume` and `sweep`: progress, Ctrl-C, and next steps."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call
from metaloom.flows.cli.output import answer, console, say, unless_closed
from metaloom.flows.errors import EXIT_INTERRUPTED, USAGE, ExtraMissing, explained
from metaloom.flows.formatting import plural, program
from metaloom.flows.operations import late
from metaloom.flows.operations.options import refuse_with, refuse_without
from metaloom.flows.operations.report import write
from metaloom.flows.operations.train import check_log, new_folder, new_settings, require_witness
from metaloom.flows.results.checks import what_helps
from metaloom.flows.runs import report_folder, run_folder
from metaloom.flows.streams import data_stream
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import printable
from metaloom.storage import InvalidRunName, argument, location, open_run

if TYPE_CHECKING:
    from metaloom.flows.graph.loop import TrainResult
    from metaloom.flows.observer import Observer
    from metaloom.flows.opened import Run, Runs
    from metaloom.flows.results.sweep import SweepObserver, SweepResult
    from metaloom.flows.sweeps.stored import Sweep


def train(
    call: "Call[Run]",
    *,
    dry_run: Annotated[
        bool,
        Parameter(help="Print the run's environment steps and this machine's resources without creating anything."),
    ] = False,
    probe: Annotated[
        bool,
        Parameter(
            help="With --dry-run, also measure memory, disk and time in up to ten iterations in a temporary folder."
        ),
    ] = False,
    as_json: bool,
) -> int:
    """Train a run, or print its estimated cost if `dry_run` is True."""
    if not dry_run:
        refuse_without("--dry-run", probe=probe)
        return shown(call, as_json=as_json)
    check_log(call["log"], call["film_every"])
    short = {name: call[name] for name in ("iterations", "seed", "device")}
    config = new_settings(call["recipe"], call["overrides"], **short)
    require_witness(call["strict"], witness=False)
    found = late.dry_run(config, new_folder(call["recipe"], call["run"], config), call["backend"], probe=probe)
    answer(as_json, found.document, found.table)
    if found.refusal is None:
        return 0
    print(f"metaloom: {printable(found.refusal)}", file=sys.stderr)
    return USAGE


def shown(call: "Call[Run]", *, as_json: bool) -> int:
    """Train or resume a run, show its progress, and return the exit code."""
    return cast(int, call(progress=partial(_train, call["log"], as_json)))


def _train(log: Sequence[str], as_json: bool, folder: Path, start: "Callable[[Observer], TrainResult]") -> int:
    go_on = f"continue with: metaloom resume {argument(folder)}"

    def again() -> str:
        return go_on if (folder / "run.json").exists() else "nothing was stored yet"

    STATUS.end()
    with (
        late.stop_on_interrupt(again) as stop,
        late.shown_progress(mode="json" if as_json else "auto", stop=stop, out=data_stream()) as observer,
    ):
        result = start(replace(observer, iteration_done=unless_closed(observer.iteration_done)))
    announce, done = unless_closed(say), plural(result.iterations_done, "iteration")
    if result.stopped:
        announce(as_json, f"stopped after {done}; {go_on}")
        return EXIT_INTERRUPTED
    if result.damage is not None:
        lines = [*(f"repaired  {line}" for line in result.repaired), *(f"damaged   {line}" for line in result.damage)]
        ending = [*what_helps(folder, result.damage)] if result.damage else ["verified  every file is intact"]
        announce(as_json, "\n".join([*lines, *ending]))
    if result.damage:
        return 1
    if result.enough:
        announce(as_json, f"\nended after {done}, as `stop` requires: {'; '.join(result.enough)}")
    elif not result.computed and result.damage is None:
        more = f"metaloom resume {argument(folder)} --iterations N"
        announce(as_json, f"nothing to do: the run already has its {done}; for more: {more}")
    if stop():  # there may be no time for charts
        announce(as_json, f"complete; for its report: metaloom report {argument(folder)}")
        return 0
    with nullcontext() if as_json else STATUS.shown("writing the report", console()):
        steps = _next_steps(result.path)
    announce(as_json, steps)
    if "tensorboard" in log:
        announce(as_json, f"  tensorboard --logdir {location(late.log_folder(result.path) / 'tensorboard')}")
    return 0


def _next_steps(folder: Path) -> str:
    try:
        drawn = str(write(open_run(folder), report_folder(folder)))
    except (ExtraMissing, ModuleNotFoundError) as missing:
        drawn = f"no report       {explained(missing)}"
    place = location(folder)
    name = argument(folder)
    with suppress(InvalidRunName):  # a path may end in any name
        name = folder.name if run_folder(folder.name) == folder else name
    question = f"import metaloom; print(metaloom.open_run({place!r}).episodes().to_pandas())"
    return "\n".join(
        [
            f"\nrun             {place}",
            drawn,
            "\nlook further:",
            f"  {program('metaloom')} view {name}",
            f"  {program('metaloom')} show {name}",
            f"  {program('metaloom')} replay {name}@0",
            f"  {program('python')} -c {question!r}",
        ]
    )


def sweep(
    call: "Call[Runs]",
    *,
    status: Annotated[
        bool, Parameter(help="Show the progress of a sweep without training; RECIPE is then the name of the sweep.")
    ] = False,
    dry_run: Annotated[bool, Parameter(help="List the planned runs without training.")] = False,
    as_json: bool,
) -> int:
    """Train a sweep, or show its runs if `status` or `dry_run` is True."""
    if status:
        chosen = {name: call[name] or None for name in ("grid", "optuna", "search", "metric")}
        given = {"seeds": call["seeds"], **chosen, "set": call["overrides"] or None, "name": call["name"]}
        refuse_with("--status", **given, extend=call["extend"])
        return _show_sweep(late.require_sweep(call["recipe"]), as_json=as_json)
    if dry_run:
        return cast(int, call(progress=lambda planned, start: _show_sweep(planned, as_json=as_json)))
    return cast(int, call(progress=partial(_train_sweep, as_json)))


def _show_sweep(sweep: "Sweep", *, as_json: bool) -> int:
    trials = late.trials_of(sweep)
    rows = late.sweep_rows(sweep, trials)
    about = {"sweep": sweep.name, "recipe": sweep.recipe, "runs": rows}
    answer(as_json, lambda: about | late.search_info(sweep, trials), lambda: late.sweep_table(sweep, rows))
    if not as_json and rows and (lines := late.best_lines(sweep, trials)):
        say(as_json, "\n".join(lines))
    return 0


def _train_sweep(as_json: bool, planned: "Sweep", start: "Callable[[SweepObserver], SweepResult]") -> int:
    done = sum(late.is_complete(planned.folder(run)) for run in planned.runs)
    announce = unless_closed(say)
    announce(as_json, f"sweep {planned.name}: {plural(planned.num_runs, 'run')}, {done} complete")
    go_on = f"continue with the same command, or: metaloom sweep {planned.name}"
    STATUS.end()
    mode = "json" if as_json else "auto"
    with (
        late.stop_on_interrupt(lambda: go_on) as stop,
        late.sweep_progress(planned.num_runs, done, mode, stop=stop, out=data_stream()) as observer,
    ):
        begun, ended = unless_closed(observer.begun), unless_closed(observer.ended)
        result = start(replace(observer, begun=begun, ended=ended))
    if result.stopped:
        announce(as_json, f"stopped; {go_on}")
        return EXIT_INTERRUPTED
    if result.failed:
        lines = [f"failed  {outcome.run.name}  {outcome.message}" for outcome in result.failed]
        announce(as_json, "\n".join([*lines, f"to try again: metaloom sweep {planned.name}"]))
        if planned.search is None:
            return 1
    if not as_json:
        _show_sweep(result.sweep, as_json=False)
    if planned.search is not None:
        return 0 if late.best_of(late.trials_of(result.sweep)) is not None else 1
    announce(as_json, f"compare them: metaloom compare {planned.name}")
    return 0
