"""Building blocks for the commands' tables. Stored text is never passed to rich as markup."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from metaloom.flows.formatting import number
from metaloom.pipeline.shown import printable

_HEAD = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)
"""Table style with a line below the header and no frame, in ASCII."""
_PROSE_WIDTH = 30  # maximum line length of prose columns


class FittedTable(Table):
    """Table that drops columns until it fits the width, so that no word is broken.

    The columns in `drop` are dropped in order; the text of the columns in `prose` wraps between words.
    """

    drop: Sequence[str] = ()
    prose: Sequence[str] = ()

    def add_row(self, *cells: Any, style: Any = None, end_section: bool = False) -> None:
        """Add a row of values, each of which is converted to text."""
        super().add_row(*map(as_text, cells), style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.drop:
            yield from super().__rich_console__(console, options)
            return
        kept, fits = [*self.columns], False
        for name in (None, *self.drop):
            kept = [column for column in kept if str(column.header) != name]
            table = self._with_columns(kept, no_wrap=True, max_width=_PROSE_WIDTH)
            if fits := Measurement.get(console, options.update_width(10_000), table).maximum <= options.max_width:
                break
        yield self._with_columns(kept, no_wrap=fits, max_width=None)

    def _with_columns(self, kept: Sequence[Column], *, no_wrap: bool, max_width: int | None) -> "FittedTable":
        """Return a copy with only these columns; prose columns always wrap and have at most this width."""
        table = copy(self)
        table.drop, table.columns = (), []
        for n, column in enumerate(kept):
            prose = str(column.header) in self.prose
            wrapped = {"no_wrap": no_wrap and not prose, "max_width": max_width if prose else None}
            table.columns.append(replace(column, _index=n, **wrapped))
        return table


def new_table(
    *columns: str, rows: Iterable[Iterable[object]] = (), drop: Sequence[str] = (), prose: Sequence[str] = ()
) -> FittedTable:
    """Return a FittedTable without a frame. Columns whose names start with ">" are right-aligned."""
    table = FittedTable(box=_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    table.drop, table.prose = drop, prose
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(as_text(name.removeprefix(">")), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def fact_grid(rows: Iterable[tuple[str, object]]) -> Table:
    """Return a two-column grid of names and values."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*map(as_text, row))
    return grid


def heading(text: str) -> Text:
    """Return a bold heading below an empty line."""
    return Text(f"\n{printable(text)}", "bold")


def optional(value: float | None) -> str:
    """Format a number, or return a dash for None."""
    return "-" if value is None else number(value)


def one_line(text: str) -> str:
    """Return a text with its newlines escaped; the name of a run's folder may contain some."""
    return text.replace("\n", r"\n")


def as_text(value: object, style: str = "") -> Text:
    """Convert a value to rich text, in which [brackets] are not read as markup."""
    if isinstance(value, Text):
        return Text.assemble(value, style=style) if style else value
    return Text(printable(value), style)
