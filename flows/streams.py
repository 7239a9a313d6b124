"""Standard streams that may go away: a full disk, a closed terminal, a descriptor that was closed from the start."""

import io
import os
import sys
from contextlib import suppress
from functools import cache
from typing import TextIO, cast

_told = False


def keep_streams() -> None:
    """Have standard output raise BrokenPipeError whatever it fails of, and standard error fail of nothing.

    A descriptor that is closed would be given to the next file that is opened, and be printed into.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is free; standard output that is closed is not written
    sys.stdout = _stream(_Output(1, "w", closefd=False), cast(TextIO | None, sys.stdout))
    sys.stderr = _stream(_Errors(2, "w", closefd=False), cast(TextIO | None, sys.stderr), line_buffering=True)


@cache
def print_to_errors() -> None:
    """Send what this process prints to standard error, also past Python, and fail of nothing there."""
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = _stream(_Errors(1, "w", closefd=False), sys.stdout, line_buffering=True)
    sys.stderr = _stream(_Errors(2, "w", closefd=False), sys.stderr, line_buffering=True)


class _Output(io.FileIO):
    """Says once, where that can be said, what it fails of."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        global _told
        try:
            return super().write(data)
        except BrokenPipeError:  # its reader has read enough
            raise
        except OSError as error:
            if not _told:
                _told = True
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
