"""`metaloom export`: which formats there are, and which options each takes."""

from pathlib import Path
from typing import Literal

from metaloom.flows.errors import UsageError
from metaloom.flows.graph.run_stages import config_of
from metaloom.storage import Run
from metaloom.storage.export import Export, export_histories, export_parquet

Format = Literal["parquet", "minari", "histories", "tensorboard"]
By = Literal["task", "position"]


def export(
    run: Run,
    out: Path,
    to: Format,
    *,
    iterations: slice | int | None = None,
    steps: tuple[int, ...] = (),
    by: By | None = None,
) -> Export:
    """Write a run in another format.

    Args:
        run: the run.
        out: a new or empty folder.
        to: the format.
        iterations: which of the complete iterations; None for all.
        steps: which inner steps; empty for all.
        by: what a history belongs to; only for histories.

    Raises:
        UsageError: the format takes no such option, needs a package that is not installed, or nothing would be in it.
        metaloom.storage.export.ExportExists: there is something at `out`.
    """
    if by is not None and to != "histories":
        raise UsageError(f"found --by {by} with --to {to}; only histories have it, leave it out")
    if steps and to == "tensorboard":
        raise UsageError("found --step with --to tensorboard, whose metrics are of whole iterations; leave it out")
    rounds = range(config_of(run).algorithm.adaptation_steps + 1)
    if wrong := [step for step in steps if step not in rounds]:
        raise UsageError(
            f"found --step {wrong[0]}; required one of {', '.join(map(str, rounds))}: the rounds of this run"
        )
    if not len(run.select(iterations)):
        raise UsageError(f"{run.path}: found no complete iteration to export; required at least one")
    if to in ("minari", "histories") and next(Export(out).available(run, iterations, steps or None), None) is None:
        raise UsageError(
            f"{run.path}: found no iteration whose episodes are stored; required one. "
            f"`metaloom replay {run.path} --materialise` brings back what was thinned"
        )
    match to:
        case "parquet":
            return export_parquet(run, out, iterations=iterations, steps=steps or None)
        case "histories":
            return export_histories(run, out, by=by or "task", iterations=iterations, steps=steps or None)
        case "minari":
            from metaloom.flows.exports.minari import export_minari

            return export_minari(run, out, iterations=iterations, steps=steps or None)
        case "tensorboard":
            from metaloom.flows.exports.tensorboard import export_tensorboard

            return export_tensorboard(run, out, iterations=iterations)
