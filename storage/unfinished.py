"""Folders for unfinished work, which are removed with their process, even if it is killed."""

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
    """Return the suffix of this machine's folders: machines sharing a disk do not see each other's locks."""
    return f".{socket.gethostname()}{SUFFIX}"


@contextmanager
def unfinished_folder(parent: Path, name: str, mode: int = 0o777) -> Generator[Path, None, None]:
    """Make a hidden folder for the block, and remove folders of killed processes in `parent`.

    To keep content, move it elsewhere; the folder itself may also be renamed.

    Args:
        parent: Parent folder.
        name: Purpose of the folder, used in its name.
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
        # Another process may have removed the new folder as dead before it was locked.
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
    """Remove Metaloom's folders that no process has locked: a lock ends with its process."""
    ours = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(_mark())}")  # named by `_lock_new`, not by a user
    for folder in [path for path in parent.glob(f".*{SUFFIX}") if ours.fullmatch(path.name)]:
        with suppress(OSError):  # in use, another user's, or being removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock(descriptor, folder, wait=False)
                shutil.rmtree(folder)
                log.warning("removed %s, which a process that was killed had left", folder)
            finally:
                os.close(descriptor)
