"""Output of `metaloom optimize` as tables. Nothing here prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from metaloom.flows.formatting import number, short_time, stage_name
from metaloom.flows.views.parts import new_table, optional
from metaloom.flows.views.tables import meaning

if TYPE_CHECKING:
    from metaloom.flows.results.counterfactual import Counterfactual


def counterfactual_table(result: "Counterfactual") -> Table:
    """`metaloom optimize`: both outcomes side by side."""
    table = new_table("", ">as in the run", ">changed", "")
    table.title = f"iteration {result.ref.iteration}, {stage_name(result.ref)}: {_settings(result)}"
    for name, (stored, changed) in result.quantities().items():
        if name == "seconds":
            continue
        style = "" if stored == changed else "bold"
        note = meaning(name, stored) and meaning(name, changed)
        table.add_row(name, optional(stored), Text(optional(changed), style), note)
    table.add_row("time", short_time(result.stored.seconds), short_time(result.changed.seconds))
    distance = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in result.distance().items())
    same = "identical to what is stored" if result.changed.identical else f"apart: {distance}"
    table.caption = "; ".join(filter(None, (same, _reach(result), _stored_words(result))))
    return table


def grid_table(results: Sequence["Counterfactual"]) -> Table:
    """`metaloom optimize --grid`: a row per combination. Columns with one value throughout are omitted."""
    rows = [{name: c for name, (_, c) in result.quantities().items()} for result in results]
    stored = {name: s for name, (s, _) in results[0].quantities().items()}
    names = [name for name in {**stored, **{n: None for row in rows for n in row}} if name != "seconds"]
    names = [name for name in names if len({row.get(name) for row in (stored, *rows)}) > 1]
    distances = [result.distance() for result in results]
    table = new_table("settings", *(f">{name}" for name in names), *(f">{name}" for name in distances[0]), ">time")
    ref = results[0].ref
    table.title = f"iteration {ref.iteration}, {stage_name(ref)}"
    blank = [""] * len(distances[0])
    table.add_row(
        "as in the run", *(optional(stored.get(n)) for n in names), *blank, short_time(results[0].stored.seconds)
    )
    for result, row, distance in zip(results, rows, distances, strict=True):
        values = (*(optional(row.get(name)) for name in names), *map(number, distance.values()))
        table.add_row(_settings(result), *values, short_time(result.changed.seconds))
    table.caption = _stored_words(results[0])
    return table


def _reach(result: "Counterfactual") -> str:
    """Name the first stage that the changed settings affect; "" if no setting changed."""
    if not result.changed.settings:
        return ""
    if result.first_changed is not None:
        return f"the first stage that changes is {stage_name(result.first_changed)}"
    computed = ", ".join(map(stage_name, result.changed.digests))
    return f"of what was computed again ({computed}), no stage reads the changed settings with any effect"


def _stored_words(result: "Counterfactual") -> str:
    if result.stored.identical:
        return "with the run's own settings the stage gives the stored bits"
    return "with the run's own settings the stage does NOT give the stored bits: see `metaloom replay`"


def _settings(result: "Counterfactual") -> str:
    return " ".join(result.changed.settings) or "no change"
