"""`export`: writes a run in another format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.exports import By, format_names
from metaloom.flows.exports import export as export_run
from metaloom.flows.operations.options import RunArgument
from metaloom.flows.runs import folder_of, parse_span
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_run
from metaloom.storage.export import Export

_FORMATS = f"Format: {', '.join(format_names())}, or module:FORMAT. Some require the extra of the same name."


@checked
def export(
    run: RunArgument,
    *,
    to: Annotated[str, Parameter(help=_FORMATS)],
    out: Path | str,
    iterations: str | None = None,
    step: Sequence[int] = (),
    by: By | None = None,
) -> Export:
    """Export a run to Parquet, Minari or another format.

    Example: `metaloom export first --to parquet --out first-parquet`

    Args:
        run: Run to export.
        to: Name of the format, or module:FORMAT.
        out: New or empty folder; with --to delta, it may contain the tables of other runs.
        iterations: N or FROM:TO, as in Python slicing; all complete ones by default.
        step: Export only the episodes of this inner step; repeatable.
        by: Write one learning history per task, or per index in the meta-batch.
    """
    chosen = None if iterations is None else parse_span("--iterations", iterations)
    far = STATUS.counted("iterations")
    return export_run(open_run(folder_of(run)), Path(out), to, iterations=chosen, steps=step, by=by, on_progress=far)
