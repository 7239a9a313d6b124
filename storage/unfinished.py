"""Folders of work that is not finished, which go with the process that works in them, even if it is killed."""

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
    """Return the suffix of this machine's folders, since machines that share the disk do not see each other's locks."""
    return f".{socket.gethostname()}{SUFFIX}"


@contextmanager
def unfinished_folder(parent: Path, name: str, mode: int = 0o777) -> Generator[Path, None, None]:
    """Make a hidden folder for as long as the block lasts, and remove those in `parent` whose process was killed.

    To keep something, rename it away; the folder itself may be renamed too.

    Args:
        parent: Parent folder.
        name: Purpose of the folder; part of its name.
        mode: Permissions, masked by the umask.
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
        # Another process may have taken the new folder for a dead one before it was locked.
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(BlockingIOError):
            lock(descriptor, folder, wait=False)
            if folder.is_dir():
                return folder, descriptor
        os.close(descriptor)


def _remove_dead(parent: Path) -> None:
    """Remove our folders that no process has locked: the lock goes with the process that made them."""
    ours = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(_mark())}")  # as `_lock_new` calls them, and no user does
    for folder in [path for path in parent.glob(f".*{SUFFIX}") if ours.fullmatch(path.name)]:
        with suppress(OSError):  # it lives, it is another user's, or somebody else is removing it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock(descriptor, folder, wait=False)
                shutil.rmtree(folder)
                log.warning("removed %s, which a process that was killed had left", folder)
            finally:
                os.close(descriptor)
