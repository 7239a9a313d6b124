"""Output of `metaloom show --stage sample_transitions`: the transitions of a minibatch. Nothing here prints."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from metaloom.flows.formatting import as_json, number, stage_label
from metaloom.flows.views.parts import new_table
from metaloom.storage import Run

_MOST_COMPONENTS = 4


def minibatch_info(run: Run, iteration: int, update: int, rows: slice, *, context: bool) -> dict[str, Any]:
    """Describe transitions of a gradient step and their origins, as JSON data."""
    table = run[iteration].transitions(update, context=context, rows=rows)
    batches = run[iteration].minibatches()
    numbers = batches.context_rows if context else batches.rows
    assert numbers is not None
    return {
        "run": run.path.name,
        "iteration": iteration,
        "update": update,
        "num_updates": batches.num_updates,
        "context": context,
        "tasks": batches.task_ids[update].tolist(),
        "rows_per_task": numbers.shape[2],
        "transitions": as_json(table.to_pylist()),
    }


def minibatch_view(info: Mapping[str, Any]) -> Table:
    """Show the result of `minibatch_info` as a table."""
    table = new_table(
        *(">buffer", ">row", ">iteration", "stage", ">task", ">episode", ">t"),
        *("observation", "action", "reward", "next observation", "terminated"),
    )
    for row in info["transitions"]:
        table.add_row(
            *(row[name] for name in ("memory", "row", "iteration")),
            stage_label(row["stage"], row["step"]),
            *(row[name] for name in ("task", "episode", "t")),
            *(_numbers(row[name]) for name in ("observation", "action", "reward", "next_observation")),
            "yes" if row["terminated"] else "",
        )
    kind = "context" if info["context"] else "minibatch"
    all_rows = len(info["tasks"]) * info["rows_per_task"]
    table.title = (
        f"{info['run']}, iteration {info['iteration']}, {kind} of gradient step {info['update']} of "
        f"{info['num_updates']}: {len(info['tasks'])} x {info['rows_per_task']} transitions"
    )
    table.caption = f"{len(info['transitions'])} of {all_rows} transitions; --rows FROM:TO shows others"
    return table


def _numbers(value: Any) -> str:
    """Format a scalar, or the first components of a vector."""
    if not isinstance(value, list):
        return "-" if value is None else number(value)
    shown = ", ".join(_numbers(component) for component in value[:_MOST_COMPONENTS])
    return shown if len(value) <= _MOST_COMPONENTS else f"{shown}, ... ({len(value)})"
