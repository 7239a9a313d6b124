"""Terminal parts of the other operations: questions, progress, and output before the result."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call, show_result
from metaloom.flows.cli.output import OutputClosed, answer, console, say
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural, size
from metaloom.flows.operations import late, operations
from metaloom.flows.operations.options import agree
from metaloom.flows.operations.rm import check_removable, dependents
from metaloom.flows.operations.show import found
from metaloom.flows.results.disk import bytes_freed
from metaloom.flows.runs import RunAt, folders_of, require_one_iteration, run_folder
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import printable
from metaloom.storage import Writer, current_writer, open_run

if TYPE_CHECKING:
    from metaloom.flows.opened import Run
    from metaloom.flows.results.cancel import Cancelled
    from metaloom.flows.results.comparison import Comparison
    from metaloom.flows.results.counterfactual import Counterfactual
    from metaloom.flows.results.disk import Removed
    from metaloom.flows.run_log import LogLine
    from metaloom.flows.trained.policy import TrainedPolicy
    from metaloom.flows.views.watching import Ending


def fork(call: "Call[Run]") -> int:
    """Print what the new run shares with its parent."""
    parent = RunAt.of(call["parent"], learner=True).path
    call(account=lambda made: console().print(late.fork_view(made, parent)))
    return 0


def policy(call: "Call[TrainedPolicy]") -> int:
    """Print the policy and its file."""
    console().print(f"{call()!r}  {call['out']}", markup=False)
    return 0


def compare(
    call: "Call[Comparison]",
    *,
    plot: Annotated[
        Path | None,
        Parameter(
            help="Plot means, curves, profiles and probabilities of improvement into this .png, .svg or .pdf file."
        ),
    ] = None,
    as_json: bool = False,
) -> int:
    """Print the comparison, and draw it where that is wanted."""
    if plot is not None:
        late.check_plot_file(plot)
    found = call()
    # First, since a full disk may keep a picture from being written.
    show_result(operations()["compare"], found, as_json)
    if plot is not None:
        late.write_plot(plot, found.plot())
    return 0


def optimize(
    call: "Call[Counterfactual]",
    *,
    grid: Annotated[
        Sequence[str], Parameter(help="Try several values: `--grid algorithm.clip_eps=0.1,0.2`. Repeatable.")
    ] = (),
    as_json: bool = False,
) -> int:
    """Compare the outcomes under all values of a grid."""
    path, iteration = require_one_iteration(call["run"], None)
    agree(path, call["trust"])
    values = late.parse_grid(grid)
    results: list[Counterfactual] = []
    for result in late.optimize_grid(
        path, iteration, values, call["overrides"], stage=call["stage"], step=call["step"]
    ):
        results.append(result)
        STATUS.far(f"{len(results)} of {prod(map(len, values.values()))} settings")
    table = (lambda: late.grid_table(results)) if values else (lambda: late.counterfactual_table(results[0]))
    answer(as_json, lambda: [result.as_dict() for result in results], table)
    return 0


def rm(call: "Call[Removed]", *, yes: Annotated[bool, Parameter(help="Do not ask.")] = False) -> int:
    """Ask before runs are removed."""
    paths = list(dict.fromkeys(map(check_removable, folders_of(call["runs"]))))
    for path in paths:
        console().out(f"to remove: {path}")
        for line in dependents(path, path.parent):
            console().out(f"  {line}")
    if paths and not yes:
        if not sys.stdin.isatty():
            raise UsageError("found no terminal to ask on; required --yes")
        STATUS.end()
        said = input(f"{plural(len(paths), 'run')}, {size(bytes_freed(paths))} to be freed. Remove? [y/N] ")
        if said.strip().lower() not in ("y", "yes"):
            console().out("nothing removed")
            return 1
    with nullcontext() if yes else STATUS.shown("removing", console()):
        removed = call()
    console().out(str(removed))
    return 0


def cancel(call: "Call[Cancelled]") -> int:
    """Print who is asked to stop before waiting for it."""
    out = console().out

    def asked(writer: Writer) -> None:
        out(f"asked {writer} to finish its stage and stop; Ctrl-C ends this wait, and the request stands")
        if writer.is_stopped:
            again, end = (f"kill -{signal} {writer.pid}" for signal in ("CONT", 9))
            out(f"it is stopped and does not react; `{again}` lets it continue, `{end}` ends it")

    try:
        done = call(asked=asked)
    except KeyboardInterrupt:
        out("\nno longer waiting; the request stands")
        return 0
    out(str(done))
    return 0 if done.went_well else 1


def watch(call: "Call[Ending]", *, as_json: bool = False) -> int:
    """Print how the training ended; Ctrl-C ends watching alone."""
    STATUS.end()
    with suppress(KeyboardInterrupt):
        try:
            ending = call(lines=as_json)
        except BrokenPipeError:
            raise OutputClosed from None
        say(as_json, ending.message)
        return 0 if ending.went_well else 1
    return 0


def logs(
    call: "Call[list[LogLine]]",
    *,
    follow: Annotated[
        bool,
        Parameter(
            name=("--follow", "-f"),
            help="Go on with what is logged from now on, until nobody writes the run or you press Ctrl-C.",
        ),
    ] = False,
    as_json: bool = False,
) -> int:
    """Print the lines of a log, then new lines as they are added."""
    opened = open_run(run_folder(call["run"]))
    reader, any_line = late.LogReader(opened.path), False

    def text(line: late.LogLine) -> str:
        if as_json:
            return json.dumps(line.fields)
        where = f" {line.ref.iteration} {line.ref.stage} k={line.ref.step}" if line.ref else ""
        return f"{line.time[:19].replace('T', ' ')} {line.level:7}{printable(where)}  {line.message}"

    with suppress(KeyboardInterrupt):
        while True:
            writer = current_writer(opened.path, opened.files.remote)
            for line in reader.new_lines():
                any_line = True
                if line.is_at_least(call["level"]):
                    console().out(text(line))
            if not follow or writer is None:
                break
            time.sleep(0.5)
    if not any_line and not as_json:
        console().out(
            f"no log of {opened.location} here: it was trained by an earlier version, or on another machine, or has "
            "been copied without it"
        )
    return 0


def view(call: "Call[None]") -> int:
    """Print the address of the page."""
    STATUS.end()
    call(opened=lambda address: console().out(f"{address}  (Ctrl-C ends it)"))
    return 0


def graph(call: "Call[str]") -> int:
    """Print the drawing as it is."""
    drawing = call()
    STATUS.end()
    print(drawing, end="")
    return 0


def show(
    call: "Call[Any]",
    *,
    everything: Annotated[
        bool, Parameter(name="--all", help="Show every setting of a run, its environment and its sizes on disk.")
    ] = False,
    as_json: bool = False,
) -> int:
    """Print what is found as data or drawn."""
    given = {**call.given}
    answer(as_json, *found(RunAt.parse(given.pop("run")), **given, everything=everything))
    return 0
