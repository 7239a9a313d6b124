"""File operations for runs: reads that do not follow links, writes that survive a power failure, sealed documents.

A document is written in canonical form (sorted keys, fixed separators) with the SHA-256 of that form without the hash
itself. A document with a flipped byte does not parse, is not canonical, or does not match the hash.
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

from metaloom.storage.errors import StorageFailed, damaged, linked

Content = tuple[bytes, ...]  # content of a file in pieces


def read_file(path: Path, *, limit: int) -> bytes:
    """Read a regular file. Raises DamagedRun if it exceeds `limit` bytes, and the same errors as `open_file`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise damaged(path, f"holds {size} bytes, more than the {limit} allowed for this file")
        try:
            return file.readall() or b""
        except OSError as error:
            raise damaged(path, error.strerror or "cannot be read") from error


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading.

    Raises FileNotFoundError if there is no such file, DamagedRun if it is not a regular file, and StorageFailed if the
    system rejects the read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise linked(path) from error
        if error.errno in (errno.ENXIO, errno.ENOTDIR):
            raise damaged(path, "not a regular file") from error
        raise _refused(path, error, required="a file that can be read") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):  # a folder, for which there is no file object, or a device, which may be infinite
        os.close(descriptor)
        raise damaged(path, f"{'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file")
    return FileIO(descriptor, "rb")


def folder_entries(folder: Path) -> list[os.DirEntry[str]] | None:
    """Return the entries of a folder, or None if it does not exist. Raises StorageFailed if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _refused(folder, error, required="a folder that can be listed") from error


def _refused(path: Path, error: OSError, *, required: str) -> StorageFailed:
    # The run may be intact, so do not report damage, which a repair would remove.
    action = "Check its permissions, its disk, and the limit on open files (`ulimit -n`)"
    return StorageFailed(path, found=error.strerror or str(error), required=required, action=action)


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file or folder exclusively.

    Raises BlockingIOError if another process holds the lock and `wait` is False.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Within the block, lock a folder exclusively, waiting while another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder durably, unless it exists."""
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_folder(path.parent)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not path.parent.is_dir():
        make_folders(path.parent)
    make_folder(path)


def replace_file(path: Path, content: bytes, part: Path) -> None:
    """Replace a file atomically and durably, through the temporary path `part` in the same folder."""
    with open(part, "wb") as file:
        file.write(content)
        sync_file(file)
    os.replace(part, path)
    sync_folder(path.parent)


def sync_file(file: IO[bytes]) -> None:
    """Flush a file's data to disk, including Python's buffers."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Document = dict[str, Any]

_HASH = "sha256"
_LARGEST = 16 * 2**20  # parsed JSON can take fifty times as much memory


def render(document: Mapping[str, Any], *, indented: bool = False) -> bytes:
    """Serialize a document to canonical JSON bytes. Raises ValueError or TypeError if JSON cannot represent a value."""
    layout: dict[str, Any] = {"indent": 1} if indented else {"separators": (",", ":")}
    return json.dumps(document, sort_keys=True, allow_nan=False, ensure_ascii=False, **layout).encode() + b"\n"


def sealed(document: Mapping[str, Any], *, holder: str | None = None) -> Document:
    """Return a copy of a document with its hash, at the top level or in the mapping at key `holder`."""
    copy: Document = dict(document)
    target = copy
    if holder is not None:
        target = copy[holder] = dict(copy[holder])
    target.pop(_HASH, None)
    target[_HASH] = hashlib.sha256(render(copy)).hexdigest()
    return copy


def read_sealed(path: Path, *, indented: bool = False, holder: str | None = None) -> Document:
    """Read a document from a file and verify its hash. Raises FileNotFoundError or DamagedRun."""
    raw = read_file(path, limit=_LARGEST)
    try:
        return parse_sealed(raw, indented=indented, holder=holder)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def parse_sealed(raw: bytes, *, indented: bool = False, holder: str | None = None) -> Document:
    """Parse a document and verify its hash. Raises ValueError if it is invalid."""
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise ValueError(f"the JSON is a {type(document).__name__}, not an object")
    document = cast(Document, document)
    try:
        canonical = render(document, indented=indented) == raw
        intact = canonical and sealed(document, holder=holder) == document
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("the content does not match its checksum")
    return document
