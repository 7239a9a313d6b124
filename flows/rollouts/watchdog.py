"""Ends this process when a rollout stands still, whatever it does: asleep, or in C with the interpreter's lock held.

Python's own watchdog (`faulthandler.dump_traceback_later`) is a thread of C that needs no lock. There is one in a
process, so the rollouts of a process share it: it is set to the first of their deadlines.
"""

import faulthandler
import io
import threading
import time
from pathlib import Path


class Watchdog:
    """A rollout's part of the watchdog; used by one thread alone."""

    def __init__(self, timeout_seconds: float, report: Path) -> None:
        """Nothing is watched until `alive` is called.

        Args:
            timeout_seconds: how long one call of an environment may take; it is ended after at most a tenth more.
            report: file into which every thread's traceback is written before the process ends.
        """
        self._slack = min(1.0, timeout_seconds / 10)
        self._patience = timeout_seconds + self._slack
        self._report = report.open("wb", buffering=0)
        self._set_again = 0.0

    def alive(self) -> None:
        """Start the time allowed anew."""
        now = time.monotonic()
        # Setting it starts a thread, which costs as much as many steps of a small robot.
        if now >= self._set_again:
            self._set_again = now + self._slack
            _set_deadline(self, now + self._patience, self._report)

    def rest(self) -> None:
        """Watch no longer, until `alive` is called again."""
        self._set_again = 0.0
        _set_deadline(self, None, self._report)

    def close(self) -> None:
        """Watch no longer, for good."""
        self.rest()
        self._report.close()


_lock = threading.Lock()
_deadlines: dict[Watchdog, tuple[float, io.FileIO]] = {}


def _set_deadline(dog: Watchdog, deadline: float | None, report: io.FileIO) -> None:
    with _lock:
        if deadline is None:
            _deadlines.pop(dog, None)
        else:
            _deadlines[dog] = (deadline, report)
        if not _deadlines:
            faulthandler.cancel_dump_traceback_later()
            return
        first, file = min(_deadlines.values(), key=lambda entry: entry[0])
        # It counts in microseconds and refuses none of them.
        left = max(first - time.monotonic(), 1e-3)
        faulthandler.dump_traceback_later(left, exit=True, file=file)
