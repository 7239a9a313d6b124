"""What commands print that is more than the result of their operation, or earlier."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call, show_result
from metaloom.flows.cli.options import Repeated
from metaloom.flows.cli.output import answer, console
from metaloom.flows.operations import operations
from metaloom.flows.operations.options import agree
from metaloom.flows.runs import RunAt, require_one_iteration
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.opened import Run
    from metaloom.flows.results.comparison import Comparison
    from metaloom.flows.results.counterfactual import Counterfactual
    from metaloom.flows.trained.policy import TrainedPolicy


def fork(call: "Call[Run]") -> int:
    """Print what the new run shares with its parent."""
    from metaloom.flows.views.tables import fork_view

    parent = RunAt.of(call.given["parent"], learner=True).path
    call(account=lambda made: console().print(fork_view(made, parent)))
    return 0


def policy(call: "Call[TrainedPolicy]") -> int:
    """Print the policy and its file."""
    console().print(f"{call()!r}  {call.given['out']}", markup=False)
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
        from metaloom.flows.views.evaluation_plots import check_plot_file

        check_plot_file(plot)
    found = call()
    # First, since a full disk may keep a picture from being written.
    show_result(operations()["compare"], found, as_json)
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import write_plot

        write_plot(plot, found.plot())
    return 0


def optimize(
    call: "Call[Counterfactual]",
    *,
    grid: Annotated[
        Repeated, Parameter(help="Try several values: `--grid algorithm.clip_eps=0.1,0.2`. Repeatable.")
    ] = (),
    as_json: bool = False,
) -> int:
    """Compare the outcomes under all values of a grid."""
    path, iteration = require_one_iteration(call.given["run"], None)
    agree(path, call.given.get("trust", False))
    from metaloom.flows.commands.optimize import sweep
    from metaloom.flows.sweeps.space import parse_grid
    from metaloom.flows.views.comparison_tables import counterfactual_table, grid_table

    given, values = call.given, parse_grid(grid)
    results: list[Counterfactual] = []
    settings = given.get("overrides", ())
    for result in sweep(path, iteration, values, settings, stage=given.get("stage"), step=given.get("step", 0)):
        results.append(result)
        STATUS.far(f"{len(results)} of {prod(map(len, values.values()))} settings")
    table = (lambda: grid_table(results)) if values else (lambda: counterfactual_table(results[0]))
    answer(as_json, lambda: [result.as_dict() for result in results], table)
    return 0
