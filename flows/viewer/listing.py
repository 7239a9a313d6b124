"""The list of runs, kept up to date without reading again what does not change."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from metaloom import storage
from metaloom.flows.viewer.shelf import REMOTE_SECONDS
from metaloom.flows.views.run_info import list_run_row

_TOLD_BY = ("run.json", "_commits", "_sessions", "_thinned", "_segments")
"""Whatever happens to a run changes one of these."""


class RunList:
    """Rows of `metaloom ls` about runs."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[object, float, Mapping[str, Any]]] = {}
        self._lock = Lock()

    def rows(self, folders: Mapping[str, Path]) -> list[Mapping[str, Any]]:
        """One row for every run, as `metaloom ls --json` has them."""
        with self._lock:
            self._rows = {folder: row for folder, row in self._rows.items() if folder in folders.values()}
            return [self._row(folder) for folder in folders.values()]

    def _row(self, folder: Path) -> Mapping[str, Any]:
        now, stamp = time.monotonic(), tuple(_changed(folder / name) for name in _TOLD_BY)
        known = self._rows.get(folder)
        if known is not None:
            told, when, row = known
            # A writer may die without a trace, and what is under a URL has none here.
            is_fresh = now - when < REMOTE_SECONDS if storage.url_of(folder) else row.get("state") != "training"
            if told == stamp and is_fresh:
                return row
        row = list_run_row(folder)
        self._rows[folder] = stamp, now, row
        return row


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
