"""References as plain data for JSON and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from metaloom.flows.formatting import adaptation_returns, duration, size
from metaloom.flows.references.index import Reference
from metaloom.flows.views.parts import as_text, new_table, optional


def reference_rows(references: Sequence[Reference]) -> list[dict[str, Any]]:
    """One row per reference; `last_return`: average of its last iteration, after adaptation where there is any."""
    return [asdict(found) | {"last_return": (adaptation_returns(found.metrics) or [None])[-1]} for found in references]


def references_table(rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Table:
    """`metaloom reference ls`, of a folder where it is not that of the checkout."""
    columns = ("reference", "environment", "algorithm", ">seed", ">iterations", ">last return", ">took", ">size")
    table = new_table(*columns, drop=("size", "took", "seed", "environment", "algorithm"))
    for row in rows:
        table.add_row(
            *(as_text(row[name]) for name in ("name", "env", "algorithm", "seed", "iterations")),
            optional(row["last_return"]),
            duration(row["wall_seconds"]),
            size(row["size"]),
        )
    total = size(sum(row["size"] for row in rows))
    command = f"metaloom reference verify NAME@ITERATION{'' if folder is None else f' --from {folder}'}"
    table.caption = f"{total} in all; `{command}` recomputes any of their iterations"
    return table
