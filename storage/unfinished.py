"""Temporary folders for unfinished work. Folders left by killed processes are removed later."""

import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from metaloom.storage.format.files import lock

log: logging.Logger = logging.getLogger(__name__)

SUFFIX = ".unfinished"


def _mark() -> str:
    """Return the suffix of folders made on this host. Machines that share a disk do not see each other's locks."""
    return f".{socket.gethostname()}{SUFFIX}"


@contextmanager
def unfinished_folder(parent: Path, name: str, mode: int = 0o777) -> Generator[Path, None, None]:
    """Yield a new hidden folder whose name contains `name`; it is removed after the block unless renamed.

    It also removes the folders that killed processes left in `parent`.
    """
    _remove_dead(parent)
    folder, descriptor = _lock_new(parent, name, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock_new(parent: Path, name: str, mode: int) -> tuple[Path, int]:
    while True:
        folder = parent / f".{name}.{secrets.token_hex(4)}{_mark()}"
        folder.mkdir(mode)
        # Another process may have removed the new folder as abandoned before it was locked.
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(BlockingIOError):
            lock(descriptor, wait=False)
            if folder.is_dir():
                return folder, descriptor
        os.close(descriptor)


def _remove_dead(parent: Path) -> None:
    """Remove unfinished folders that no process has locked; a lock is released when its process ends."""
    ours = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(_mark())}")  # named by `_lock_new`, not by a user
    for folder in [path for path in parent.glob(f".*{SUFFIX}") if ours.fullmatch(path.name)]:
        with suppress(OSError):  # in use, another user's, or being removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock(descriptor, wait=False)
                shutil.rmtree(folder)
                log.warning("removed %s, left by a killed process", folder)
            finally:
                os.close(descriptor)
