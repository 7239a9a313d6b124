"""Tables of what an environment told of an evaluation's test episodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from metaloom.flows.formatting import number, plural
from metaloom.flows.results.evaluation_summary import AdaptationSummary
from metaloom.flows.results.success import OFFICIAL
from metaloom.flows.views.parts import as_text, heading, new_table
from metaloom.pipeline.estimation.class_returns import BALANCED


def facts_view(steps: Sequence[AdaptationSummary]) -> list[RenderableType]:
    """What the environment told of test episodes, steps side by side; nothing where it tells nothing."""
    if not steps[0].facts:
        return []
    table = new_table("of test episodes", *(f">{plural(step.adaptation_steps, 'adaptation step')}" for step in steps))
    for name in steps[0].facts:
        table.add_row(as_text(name.replace("_", " ")), *(number(step.facts[name]) for step in steps))
    return [table]


def success_view(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """`success_rows` after the last adaptation step as a table; nothing where there are none."""
    if not rows:
        return []
    last = rows[-1]["adaptation_steps"]
    table = new_table("class", ">tasks", ">success rate", *([">official success rate"] if OFFICIAL in rows[0] else []))
    for row in (row for row in rows if row["adaptation_steps"] == last):
        if row["class"] == BALANCED:
            table.add_section()
        rates = [row[name] for name in ("success_rate", OFFICIAL) if name in row]
        table.add_row(as_text(row["class"]), str(row["num_tasks"]), *map(number, rates))
    if OFFICIAL in rows[0]:
        table.caption = (
            "success rate: of all test episodes; official: of the first three of a class to finish, where success ends "
            "an episode, which is too high"
        )
    return [heading(f"success by class of task, after {plural(last, 'adaptation step')}"), table]
