"""The runs that a page shows, listed and opened once, and followed while others write them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import Any

from metaloom import storage
from metaloom.flows.viewer.curves import Curves
from metaloom.flows.views.run_info import list_run_row
from metaloom.storage import Run

REMOTE_SECONDS = 5.0
"""Interval between two requests for the state of a URL."""
_TOLD_BY = ("run.json", "_commits", "_sessions", "_thinned", "_segments")
"""Whatever happens to a run changes one of these."""


@dataclass
class OpenRun:
    """An open run and what was read of it. Hold `lock` while using it: a run caches what it reads, without a lock.

    Attributes:
        run: The run.
        curves: Its history so far, with a separate run and lock, so that nothing waits for all iterations to be read.
        lock: Lock of the run.
    """

    run: Run
    curves: Curves
    lock: RLock = field(default_factory=RLock)


class Shelf:
    """The runs in a folder or under a URL, or a single one.

    Attributes:
        place: Path or URL of a folder of runs, or of one run.
        only: Name of the run if it is a single one.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.only: str | None = place.resolve().name if storage.run_exists(place) else None
        self._open: dict[str, tuple[object, OpenRun]] = {}
        self._looked: dict[str, float] = {}
        self._folders: dict[str, Path] = {}
        self._lock = RLock()

    def folders(self) -> dict[str, Path]:
        """Return the folders of the runs by name, the newest first."""
        if self.only is not None:
            return {self.only: self.place}
        with self._lock:
            if storage.url_of(self.place) is None or self._is_time("", REMOTE_SECONDS):
                self._folders = {folder.name: folder for folder in storage.find_runs(self.place)}
            return self._folders

    def open(self, name: str) -> OpenRun:
        """Open a run by its name, which is looked up and is no path."""
        folder = self.folders().get(name)
        if folder is None:
            raise storage.RunNotFound(
                storage.location(self.place),
                found=f"no run {name!r}",
                required="the name of a run there",
                action="the list of runs has them",
            )
        with self._lock:
            # Another run of the same name has another run.json.
            identity = _changed(folder / "run.json")
            known = self._open.get(name)
            if known is None or known[0] != identity:
                self._open[name] = known = (
                    identity,
                    OpenRun(storage.open_run(folder), Curves(storage.open_run(folder))),
                )
            opened = known[1]
            remote = opened.run.files.remote
            is_old = remote is not None and self._is_time(name, REMOTE_SECONDS)
        if remote is not None and is_old:
            with opened.lock:
                remote.pull()
        return opened

    def _is_time(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._looked.get(what, float("-inf")) < seconds:
            return False
        self._looked[what] = now
        return True


class RunList:
    """Rows of `metaloom ls` about runs."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[object, float, Mapping[str, Any]]] = {}
        self._lock = Lock()

    def rows(self, folders: Mapping[str, Path]) -> list[Mapping[str, Any]]:
        """Return one row for every run, as `metaloom ls --json` has them."""
        with self._lock:
            self._rows = {folder: row for folder, row in self._rows.items() if folder in folders.values()}
            for folder in folders.values():
                now, stamp = time.monotonic(), [_changed(folder / name) for name in _TOLD_BY]
                told, when, row = self._rows.get(folder, (None, now, {}))
                # A writer may die without a trace, and what is under a URL has none here.
                is_fresh = now - when < REMOTE_SECONDS if storage.url_of(folder) else row.get("state") != "training"
                if told != stamp or not is_fresh:
                    self._rows[folder] = stamp, now, list_run_row(folder)
            return [self._rows[folder][2] for folder in folders.values()]


def _changed(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file or folder is replaced or written to; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
