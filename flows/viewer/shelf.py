"""The runs that a page shows, opened once and followed while others write them."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from metaloom import storage
from metaloom.flows.viewer.curves import Curves
from metaloom.storage import Run

REMOTE_SECONDS = 5.0
"""Between two looks at what is under a URL, where a look is a request."""


@dataclass
class OpenRun:
    """A run and what was read of it. Whoever uses it holds `lock`: a run keeps what it has read, and has no lock.

    Attributes:
        run: the run.
        curves: its history so far, with a run and a lock of its own: nothing else waits for all iterations to be read.
        lock: for the run.
    """

    run: Run
    curves: Curves
    lock: RLock = field(default_factory=RLock)


class Shelf:
    """The runs in a folder or under a URL, or a single one.

    Args:
        place: the folder of runs, or of one run.

    Attributes:
        place: the same.
        only: the run's name if it is a single one.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.only = place.resolve().name if storage.run_exists(place) else None
        self._open: dict[str, tuple[object, OpenRun]] = {}
        self._looked: dict[str, float] = {}
        self._folders: dict[str, Path] = {}
        self._lock = RLock()

    def folders(self) -> dict[str, Path]:
        """The folders of the runs by name, the newest first.

        Raises:
            StorageFailed: the object store cannot be read.
        """
        if self.only is not None:
            return {self.only: self.place}
        with self._lock:
            if storage.url_of(self.place) is None or self._is_time("", REMOTE_SECONDS):
                self._folders = {folder.name: folder for folder in storage.find_runs(self.place)}
            return self._folders

    def open(self, name: str) -> OpenRun:
        """Open a run by its name, which is looked up and is no path.

        Raises:
            StoreError: there is no such run, or it cannot be read.
        """
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
            identity = _identity(folder)
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


def _identity(folder: Path) -> object:
    try:
        status = (folder / "run.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
