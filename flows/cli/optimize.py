"""`metaloom optimize`."""

from math import prod
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import AsJson, Overrides, RunAtArgument, Trust, agree
from metaloom.flows.cli.output import answer
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import RunAt
from metaloom.flows.views.status import STATUS


def optimize(
    run: RunAtArgument,
    *,
    overrides: Overrides = (),
    grid: Annotated[
        tuple[str, ...],
        Parameter(
            name="--grid",
            negative=(),
            show_default=False,
            help="Try several values: `--grid algorithm.clip_eps=0.1,0.2`. Repeatable.",
        ),
    ] = (),
    stage: str | None = None,
    step: int = 0,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Compute a stage again under other settings.

    It runs on the stored batches, without sampling, and compares the outcomes.

    Example: `metaloom optimize first@3 --set algorithm.clip_eps=0.1`

    Args:
        stage: Stage to recompute: any that does not sample, such as adapt; by default the one that ends the iteration.
        step: Inner step of that stage.
    """
    at = RunAt.parse(run)
    if at.iteration is None:
        raise UsageError(f"{run}: required RUN@ITERATION, such as {run}@0")
    agree(at.path, trust)
    from metaloom.flows.commands.optimize import sweep
    from metaloom.flows.results.counterfactual import Counterfactual
    from metaloom.flows.sweeps.space import parse_grid
    from metaloom.flows.views.comparison_tables import counterfactual_table, grid_table

    values = parse_grid(grid)
    results: list[Counterfactual] = []
    for result in sweep(at.path, at.iteration, values, overrides, stage=stage, step=step):
        results.append(result)
        STATUS.far(f"{len(results)} of {prod(map(len, values.values()))} settings")
    table = (lambda: grid_table(results)) if values else (lambda: counterfactual_table(results[0]))
    answer(as_json, lambda: [result.as_dict() for result in results], table)
    return 0
