"""Display of values in terminals and notebooks (arrays by shape and size only), and parts of error messages."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, cast

import numpy as np

MOST_ROWS = 40
_MOST_CHARACTERS, _LAST_CHARACTERS = 2000, 500
Row = tuple[str, ...]


def printable(text: object) -> str:
    """Return text from a file or plug-in, replacing unprintable characters other than newlines and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def error_text(error: BaseException) -> str:
    """Return an error's printable message, shortened in the middle to fit on a screen."""
    text = printable(error)
    if len(text) <= _MOST_CHARACTERS:
        return text
    first = text[: _MOST_CHARACTERS - _LAST_CHARACTERS]  # the remedy is at the end
    return f"{first} ... ({len(text) - _MOST_CHARACTERS:,} more characters) ... {text[-_LAST_CHARACTERS:]}"


class Shown:
    """Base class for objects displayed as a title and a table. Dataclasses need `repr=False`."""

    def shown(self) -> tuple[str, Sequence[Row]]:
        """Return a title and table rows of equal length; the default is one row per array in a dataclass."""
        return type(self).__name__, [*arrays_in(self)]

    def __repr__(self) -> str:
        title, rows = self.shown()
        return as_text(title, rows)

    def _repr_html_(self) -> str:
        title, rows = self.shown()
        return as_html(title, rows)


def as_text(title: str, rows: Sequence[Row]) -> str:
    """Format a title and rows as text with aligned columns."""
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in _few(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([printable(title), *lines])


def as_html(title: str, rows: Sequence[Row]) -> str:
    """Format a title and rows as HTML, with all values escaped."""
    cell = '<td style="text-align:left;padding:1px 12px 1px 0">'
    lines = ("<tr>" + "".join(f"{cell}{escape(printable(text))}</td>" for text in row) + "</tr>" for row in _few(rows))
    return f'<div><b>{escape(printable(title))}</b><table style="margin:0;color:inherit">{"".join(lines)}</table></div>'


def size(num_bytes: float) -> str:
    """Format a number of bytes with decimal units, such as 950 B or 28.3 MB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _few(rows: Sequence[Row]) -> Sequence[Row]:
    if len(rows) <= MOST_ROWS:
        return rows
    rest = f"and {len(rows) - MOST_ROWS + 1} more"
    return [*rows[: MOST_ROWS - 1], (rest, *[""] * (len(rows[0]) - 1))]


def arrays_in(value: object, name: str = "") -> Iterator[Row]:
    """Yield a row per array with its name, shape, dtype and size, and a row with the text of any other field."""
    if isinstance(value, np.ndarray):
        yield name, str(list(value.shape)), str(value.dtype), size(value.nbytes)
    elif is_dataclass(value) or isinstance(value, Mapping):
        members = value if isinstance(value, Mapping) else {f.name: getattr(value, f.name) for f in fields(value)}
        for key, member in members.items():
            yield from arrays_in(member, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for place, member in enumerate(value):
            yield from arrays_in(member, f"{name}[{place}]")
    elif value is not None and value != ():
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield name, text if len(text) <= 60 else f"{text[:57]}...", "", ""


def plain_data(value: object, described: Callable[[object], str]) -> Any:
    """Convert a value to JSON data. NaN and infinities become strings; `described` converts all other objects."""
    if isinstance(value, Mapping):
        return {str(name): plain_data(part, described) for name, part in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain_data(cast(object, value.tolist()), described)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_data(part, described) for part in cast(Sequence[Any], value)]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else described(value)


class ConfigError(ValueError):
    """Raised for an invalid configuration; the message gives each field, the value found and the allowed values."""


def suggestion(found: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` for a name that resembles others, otherwise ""."""
    by_small_letters = {name.lower(): name for name in names}
    close = difflib.get_close_matches(found.lower(), by_small_letters, n=1)
    return f"; did you mean {by_small_letters[close[0]]}?" if close else ""
