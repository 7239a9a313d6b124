"""Removal of runs: a rename, then deletion file by file, so that an interruption leaves no partial run."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from metaloom.storage.errors import NotARun, RunLocked, RunNotFound, StoreError, damaged, system_errors
from metaloom.storage.format.files import make_folder, sync_folder
from metaloom.storage.format.places import argument
from metaloom.storage.format.segments import FOLDER as SEGMENTS
from metaloom.storage.read.info import read_info
from metaloom.storage.read.verify import may_belong
from metaloom.storage.write.holder import FOLDER, LOCK_NAME, acquire_lock, current_writer

REMOVED = ".metaloom-removed"  # folder next to the runs, for runs that are being removed

_OWN = {"run.json", "_commits", "_sessions", "_segments", "_thinned", "_quarantine", FOLDER, "data.zarr", "tables"}
_ACTION = "Fix that; `metaloom rm` then continues"


def check_removable(path: Path) -> Path:
    """Check that a folder is a run, even a damaged one, and has no writer or unrelated files; return its absolute path.

    Raises RunNotFound or NotARun if the folder is not a run, is a link to one, or contains unrelated files, and
    RunLocked if a process is writing the run, here or elsewhere.
    """
    path = path.absolute()
    if path.is_symlink():
        raise NotARun(
            path,
            found=f"a symbolic link to {os.readlink(path)}",
            required="the folder of a run itself",
            action="Name that folder; `rm` removes a link",
        )
    try:
        read_info(path)
    except (RunNotFound, NotARun):
        if not path.is_dir() or not (path / "_commits").is_dir():
            raise
    except StoreError:  # the run is damaged, but may be removed
        pass
    with system_errors(path, required="permission to remove these files", action=_ACTION):
        foreign = sorted(name for name in os.listdir(path) if name not in _OWN and not name.startswith(LOCK_NAME))
        if not foreign:  # files that do not belong to a run, except in quarantine and in segments
            walk = ((folder, name) for folder, _, names in os.walk(path) for name in sorted(names))
            files = (os.path.relpath(os.path.join(folder, name), path) for folder, name in walk)
            inside = (file for file in files if not file.startswith(f"{SEGMENTS}{os.sep}"))
            foreign = [file for file in inside if not may_belong(file, None)]
    if foreign:
        raise NotARun(
            path,
            found=f"{', '.join(foreign[:3])} in it",
            required="a folder with nothing but a run's own files",
            action="Move the other files elsewhere first",
        )
    if (writer := current_writer(path)) is not None:
        raise RunLocked(
            path,
            found=f"{writer} is writing it",
            required="a run without a writer",
            action=f"`metaloom cancel {argument(path)}` stops it. If its host is dead, remove the folder with `rm -r`",
        )
    return path


def remove_run(path: Path) -> None:
    """Remove a run's folder, but not files that forks share or that symbolic links point to.

    Raises the errors of `check_removable`.
    """
    path = check_removable(path)
    token = secrets.token_hex(8)
    aside = path.parent / REMOVED / f"{path.name}-{token}"
    with system_errors(path, required="permission to remove the run", action=_ACTION):
        lock = acquire_lock(path / LOCK_NAME, token, take_over=False)
        try:
            if aside.parent.is_symlink():
                raise damaged(aside.parent, "a symbolic link")
            make_folder(aside.parent)
            path.rename(aside)
            sync_folder(path.parent)  # syncing one of the two folders of a rename is enough
        finally:
            lock.release()
    _remove(aside)


def unfinished_removals(root: Path) -> list[Path]:
    """Return the paths of partly removed runs in a runs folder."""
    folder = root / REMOVED
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def finish_removals(root: Path) -> Iterator[Path]:
    """Finish interrupted removals of runs one at a time, and yield the path of each."""
    for path in unfinished_removals(root):
        _remove(path)
        yield path


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # another command may be doing the same
    with system_errors(path, required="permission to remove these files", action=_ACTION):
        if path.exists():
            shutil.rmtree(path)
    with suppress(OSError):  # while another run is being removed
        path.parent.rmdir()
