"""References as plain data for JSON and as tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from metaloom.flows.formatting import adaptation_returns, duration, plural, size
from metaloom.flows.references.index import Reference
from metaloom.flows.views.parts import new_table, optional
from metaloom.pipeline.shown import Row, Shown


def reference_rows(references: Sequence[Reference]) -> list[dict[str, Any]]:
    """Return a row per reference; `last_return`: average of its last iteration, after adaptation if there is any."""
    return [asdict(found) | {"last_return": (adaptation_returns(found.metrics) or [None])[-1]} for found in references]


class References(Shown, list[dict[str, Any]]):
    """Rows of references.

    Attributes:
        folder: Folder of the references; None for the checkout's.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], folder: Path | str | None = None) -> None:
        super().__init__(rows)
        self.folder = folder

    def shown(self) -> tuple[str, list[Row]]:
        """Return what each reference is of; see pipeline.shown."""
        columns = ("name", "env", "algorithm", "seed", "iterations", "last_return")
        return plural(len(self), "reference"), [columns, *(tuple(str(row[name]) for name in columns) for row in self)]


@dataclass(frozen=True)
class Extracted:
    """A run that was made of a reference."""

    path: Path
    reference: str

    def as_dict(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {"run": str(self.path)}

    def __str__(self) -> str:
        return f"{self.path} is {self.reference} as a run"


@dataclass(frozen=True)
class Added:
    """A reference that was made of a run."""

    reference: Reference
    folder: Path

    def as_dict(self) -> dict[str, Any]:
        """Return the row of the reference."""
        return reference_rows([self.reference])[0]

    def __str__(self) -> str:
        return f"{self.folder / self.reference.archive}: {size(self.reference.size)}"


def references_table(rows: References) -> Table:
    """`metaloom reference ls`, naming the folder unless it is the checkout's."""
    columns = ("reference", "environment", "algorithm", ">seed", ">iterations", ">last return", ">took", ">size")
    told = ("name", "env", "algorithm", "seed", "iterations")
    cells = (
        (*(r[name] for name in told), optional(r["last_return"]), duration(r["wall_seconds"]), size(r["size"]))
        for r in rows
    )
    table = new_table(*columns, rows=cells, drop=("size", "took", "seed", "environment", "algorithm"))
    total = size(sum(row["size"] for row in rows))
    command = f"metaloom reference verify NAME@ITERATION{'' if rows.folder is None else f' --from {rows.folder}'}"
    table.caption = f"{total} in all; `{command}` recomputes any of their iterations"
    return table
