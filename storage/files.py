"""Files of a run: read without following links, and made to survive a power cut."""

import errno
import os
from pathlib import Path

from storage.errors import DamagedRun

Content = tuple[bytes, ...]
"""What a file holds, in pieces."""


def read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedRun: it is a symbolic link or something else that is no file, or holds more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise _unreadable(path, "is a symbolic link or no regular file") from error
        raise
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise _unreadable(path, f"holds {size} bytes, more than the {limit} that its place allows")
        try:
            return file.readall() or b""
        except OSError as error:
            raise _unreadable(path, error.strerror or "cannot be read") from error


def make_folder(path: Path) -> None:
    """Make a folder, safe from a power cut, unless it is there."""
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, found: str) -> DamagedRun:
    return DamagedRun(
        path, found=found, required="a regular, readable file", action="`metaloom verify RUN` lists all damage"
    )
