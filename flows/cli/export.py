"""`metaloom export`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import console, print_json
from metaloom.flows.exports import By, format_names
from metaloom.flows.exports import export as export_run
from metaloom.flows.formatting import plural
from metaloom.flows.runs import parse_span, run_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_run


def export(
    run: RunArgument,
    *,
    to: Annotated[str, Parameter(help=f"The format: {', '.join(format_names())}. Some need an extra of that name.")],
    out: Path,
    iterations: str | None = None,
    step: Annotated[tuple[int, ...], Parameter(negative=(), show_default=False)] = (),
    by: By | None = None,
    as_json: AsJson = False,
) -> int:
    """Write a run as Parquet, Minari or another format.

    Example: `metaloom export first --to parquet --out first-parquet`

    Args:
        out: A new or empty folder; with --to delta also one with the tables of other runs.
        iterations: N or FROM:TO, counted like Python slices; all complete ones by default.
        step: Only the episodes of this inner step; repeatable.
        by: Give each task a learning history of its own, or each place in the meta-batch.
    """
    chosen = None if iterations is None else parse_span("--iterations", iterations)
    far = STATUS.counted("iterations")
    result = export_run(open_run(run_folder(run)), out, to, iterations=chosen, steps=step, by=by, on_progress=far)
    if as_json:
        skipped = [{"iteration": i, "reason": reason} for i, reason in result.skipped]
        done = {"path": str(result.path), "iterations": result.iterations, "rows": result.rows}
        print_json({**done, "skipped": skipped})
        return 0
    for i, reason in result.skipped:
        console().print(f"iteration {i} left out: {reason}", markup=False)
    console().print(
        f"{plural(result.iterations, 'iteration')}, {plural(result.rows, 'row')}  {result.path}", markup=False
    )
    return 0
