"""Pieces that the tables of all commands are made of. Stored text never reaches rich as markup."""

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from metaloom.flows.views.formatting import number
from metaloom.pipeline.shown import printable

_HEAD = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)
"""A line below the head and no frame, in characters that every output has."""


def new_table(*columns: str) -> Table:
    """Make a table without a frame; a column whose name starts with ">" is a number, on the right."""
    table = Table(box=_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(as_text(name.removeprefix(">")), justify=justify, overflow="fold")
    return table


def fact_grid(rows: Iterable[tuple[str, Text]]) -> Table:
    """Make a grid of names and values."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(as_text(name), value)
    return grid


def heading(text: str) -> Text:
    """Set a line in bold below an empty one."""
    return Text(f"\n{printable(text)}", "bold")


def optional(value: float | None) -> str:
    """Write a number, or a dash where there is none."""
    return "-" if value is None else number(value)


def as_text(value: object, style: str = "") -> Text:
    """Make text of a value: of a string, rich would read [brackets] in a user's name as markup."""
    return Text(printable(value), style)
