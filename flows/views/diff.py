"""Output of `metaloom diff`. Nothing here prints."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from metaloom.flows.formatting import plural, stage_name
from metaloom.flows.views.parts import as_text, heading, new_table
from metaloom.flows.views.tables import difference_table

if TYPE_CHECKING:
    from metaloom.flows.results.diff import RunDiff


def diff_view(diff: "RunDiff") -> RenderableType:
    """`metaloom diff`."""
    parts: list[RenderableType] = []
    for title, rows in (("settings", diff.settings), ("code, packages, machine", diff.environment)):
        if rows:
            cells = ((row.name, *("-" if value is None else value for value in (row.a, row.b))) for row in rows)
            parts += [heading(title), new_table("", diff.a.name, diff.b.name, rows=cells)]
    if diff.first is not None:
        parts += [heading(f"first difference: iteration {diff.first.iteration}, {stage_name(diff.first)}")]
        parts += [difference_table(diff.arrays, ("a", "b"))]
    outputs = f"{plural(diff.compared, 'output')} that both have"
    words = f"equal: all {outputs}" if diff.equal else f"{diff.different} of {outputs} differ"
    for run, count in ((diff.a, diff.only_a), (diff.b, diff.only_b)):
        words += f"; {count} {'is' if count == 1 else 'are'} in {run} only" if count else ""
    return Group(*parts, as_text(words))
