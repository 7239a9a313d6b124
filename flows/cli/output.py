"""Standard output of commands, whose reader may close it at any time."""

import io
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TextIO, cast

from rich.console import Console, RenderableType
from rich.text import Text

from metaloom.flows.streams import data_stream
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import printable

EXIT_OUTPUT_CLOSED = 128 + 13  # like a process ended by SIGPIPE

_P = ParamSpec("_P")


class OutputClosed(Exception):
    """Raised if the reader of standard output has closed it, as `head` does."""


class PipeConsole(Console):
    """Console that raises `OutputClosed` instead of exiting, and removes control codes from text."""

    @property
    def encoding(self) -> str:
        """Encoding of the output: ASCII outside a terminal, so that rich draws ASCII frames."""
        return super().encoding if self.is_terminal else "ascii"

    def on_broken_pipe(self) -> NoReturn:
        raise OutputClosed

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text without control codes, since stored text may come from anyone."""
        return super().render_str(printable(text), **options)

    def out(self, *objects: Any, **options: Any) -> None:
        super().out(*map(printable, objects), **options)


class PrintableLines(logging.Formatter):
    """Formatter that removes control codes from log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


_PLAIN = str.maketrans({"\N{MINUS SIGN}": "-", "\N{PLUS-MINUS SIGN}": "+-"})


class PlainSigns(io.TextIOBase):
    """Stream that writes minus and plus-minus signs in ASCII, so that other programs can parse the numbers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_PLAIN))

    def flush(self) -> None:
        self._stream.flush()


def console() -> Console:
    """Return a console for the current standard output; it does not wrap lines in files and pipes."""
    if STATUS.console is not None:
        return STATUS.console
    if (stream := data_stream()).isatty():
        return PipeConsole(file=stream, highlight=False)
    width = None if "COLUMNS" in os.environ else 160
    return PipeConsole(file=cast(TextIO, PlainSigns(stream)), width=width, soft_wrap=True, highlight=False)


def print_json(value: object) -> None:
    """Print a value as JSON; raise ValueError if it contains a non-finite number."""
    console().out(json.dumps(value, indent=2, default=str, allow_nan=False))


def answer(as_json: bool, data: Callable[[], object], view: Callable[[], RenderableType]) -> None:
    """Print a command's result as JSON data or as formatted text."""
    if as_json:
        print_json(data())
    else:
        console().print(view())


def say(as_json: bool, message: str) -> None:
    """Print a message that is not data; with --json, print it to standard error."""
    if as_json:
        print(printable(message), file=sys.stderr)
    else:
        console().out(message)


def unless_closed(show: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a printing function so that work continues after the output is closed."""

    def print_if_read(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            show(*args, **kwargs)
        except (OutputClosed, BrokenPipeError):
            discard_output()

    return print_if_read


def discard_output() -> None:
    """Redirect standard output to the null device; otherwise flushing its buffer at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), data_stream().fileno())
