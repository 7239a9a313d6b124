"""Standard streams that work with a full disk, a closed terminal or a closed file descriptor, and quiet loggers."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TextIO, cast

_reported = False
_data: TextIO | None = None


def keep_streams() -> None:
    """Make standard output raise BrokenPipeError for every write error, and make standard error ignore write errors.

    Closed file descriptors are replaced, since the next opened file would otherwise get their numbers.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number; nothing is written to a closed standard output
    sys.stdout = _stream(_Output(1, "w", closefd=False), cast(TextIO | None, sys.stdout))
    sys.stderr = _stream(_Errors(2, "w", closefd=False), cast(TextIO | None, sys.stderr), line_buffering=True)


def keep_output_for_data() -> None:
    """Reserve standard output for `data_stream`, and redirect all other output, such as a plug-in's, to standard error.

    Another program then reads only the command's JSON.
    """
    global _data
    _data = _stream(_Output(os.dup(1), "w", closefd=False), cast(TextIO | None, sys.stdout))
    print_to_errors()


def data_stream() -> TextIO:
    """Return the stream for a command's result: standard output, whatever a plug-in prints."""
    return sys.stdout if _data is None else _data


@cache
def print_to_errors() -> None:
    """Redirect this process's standard output, including non-Python output, to standard error. Ignore write errors."""
    sys.stdout = _stream(_Errors(1, "w", closefd=False), sys.stdout, line_buffering=True)  # flushes the one before
    sys.stderr = _stream(_Errors(2, "w", closefd=False), sys.stderr, line_buffering=True)
    os.dup2(2, 1)


@contextmanager
def quiet(level: int, *names: str) -> Iterator[None]:
    """Within the block, drop records below a level from the named loggers."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in before:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, earlier in before.items():
            logger.setLevel(earlier)


class _Output(io.FileIO):
    """Output stream that reports the first error and converts every error to BrokenPipeError."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        global _reported
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            if not _reported:
                _reported = True
                with suppress(OSError):
                    os.write(2, f"metaloom: standard output cannot be written: {error.strerror}\n".encode())
            raise BrokenPipeError(error.errno, error.strerror) from error


class _Errors(io.FileIO):
    def write(self, data: "bytes | bytearray | memoryview") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        with suppress(OSError):
            return super().write(data)
        return len(data)


def _stream(raw: io.FileIO, before: TextIO | None, *, line_buffering: bool = False) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=getattr(before, "errors", None) or "backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
        write_through=getattr(before, "write_through", False),
    )
