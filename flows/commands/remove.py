"""Remove runs, after a look at who else needs them."""

from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import run_folder
from metaloom.storage import StoreError


def check_removable(path: Path) -> Path:
    """Return the folder of a run that may be removed.

    Raises:
        UsageError: the run is under object storage.
        storage.StoreError: it is not there, is no run, holds other files, or somebody writes it.
    """
    if url := storage.url_of(path):
        raise UsageError(
            f"found {url}; required a run in a folder: remove the objects with the store's own tools, such as "
            f"`aws s3 rm --recursive {url}`, and then the cache, {path} and {path.parent / f'.{path.name}.log'}"
        )
    return storage.check_removable(path)


def dependents(path: Path, root: Path) -> list[str]:
    """Say of the runs in a folder that began with another one what they lose with it, a line each."""
    run = _readable(path)
    others = [other for folder in storage.find_runs(root) if (other := _readable(folder)) is not None]
    lines: list[str] = []
    for other in others if run is not None else ():
        parent, start = other.info.get("parent"), other.config.get("init_from")
        if isinstance(parent, dict) and run is not None and parent.get("id") == run.info["id"]:
            lines.append(f"{other.name} is a fork of it and keeps all that they share")
        if _names(start, path):
            lines.append(f"{other.name} began with its learner, which it has: only the first stage cannot be replayed")
    return lines


def _names(start: Any, path: Path) -> bool:
    """Tell whether a warm start is from the run in a folder."""
    try:
        return isinstance(start, dict) and run_folder(str(start["run"])).resolve() == path.resolve()
    except (KeyError, StoreError):
        return False


def _readable(path: Path) -> storage.Run | None:
    try:
        return storage.open_run(path)
    except StoreError:
        return None
