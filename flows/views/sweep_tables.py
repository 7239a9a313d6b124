"""Output of `metaloom sweep`. Nothing here prints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from metaloom import storage
from metaloom.flows.sweeps import Sweep
from metaloom.flows.views.formatting import plural
from metaloom.flows.views.parts import as_text, new_table, optional
from metaloom.flows.views.run_info import list_run_row
from metaloom.flows.views.tables import STATE_STYLES

Row = Mapping[str, Any]


def sweep_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """One row per run: its settings, how far it is, its last return and state; `waiting` where it has not begun."""
    rows: list[dict[str, Any]] = []
    for run in sweep.runs:
        row: dict[str, Any] = {"run": run.name, "seed": run.seed, "settings": dict(run.settings)}
        folder = sweep.folder(run)
        if not storage.run_exists(folder):
            rows.append(row | {"state": "waiting", "iterations_done": 0, "iterations": None, "last_return": None})
            continue
        about = list_run_row(folder)
        known = ("state", "iterations_done", "iterations", "last_return", "problem", "writer")
        rows.append(row | {name: about.get(name) for name in known})
    return rows


def sweep_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """Every run of a sweep, and how many are in which state."""
    table = new_table("run", *sweep.grid, ">seed", ">iterations", ">last return", "state")
    for row in rows:
        done = f"{row['iterations_done']} / {row['iterations']}" if row["iterations"] else ""
        detail = row.get("problem") or row.get("writer")
        table.add_row(
            as_text(row["run"]),
            *(as_text(row["settings"].get(key, "")) for key in sweep.grid),
            str(row["seed"]),
            done,
            optional(row["last_return"]),
            as_text(row["state"] + (f" ({detail})" if detail else ""), STATE_STYLES[row["state"]]),
        )
    table.title = as_text(f"sweep {sweep.name}: {sweep.recipe} {' '.join(sweep.settings)}".rstrip())
    table.caption = as_text(counted(rows))
    return table


def counted(rows: Sequence[Row]) -> str:
    """How many runs are in which state: "10 runs: 7 complete, 3 waiting"."""
    states = Counter(row["state"] for row in rows)
    return f"{plural(len(rows), 'run')}: {', '.join(f'{n} {state}' for state, n in states.most_common())}"
