"""Ends this process when a rollout stands still, whatever it does: asleep, or in C with the interpreter's lock held.

Python's own watchdog (`faulthandler.dump_traceback_later`) is a thread of C that needs no lock. There is one in a
process, so the rollouts of a process share it: it is set to the first of their deadlines.
"""

import faulthandler
import io
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Watchdog:
    """A rollout's part of the watchdog; used by one thread alone."""

    def __init__(self, timeout_seconds: float, report: Path, tell: Callable[[float], None]) -> None:
        """Create a watchdog that watches nothing until `alive` is called.

        Args:
            timeout_seconds: Time limit for one call of an environment; the process is ended after at most a tenth more.
            report: File into which every thread's traceback is written before the process ends.
            tell: Receives the time by which the process must have been ended, or 0 when it need not be.
        """
        self._slack = min(1.0, timeout_seconds / 10)
        self._patience = timeout_seconds + self._slack
        self._report = report.open("wb", buffering=0)
        self._identity = identity(self._report)
        self._tell = tell
        self._set_again = 0.0

    def alive(self) -> None:
        """Restart the time allowed."""
        now = time.monotonic()
        # Setting it starts a thread, which costs as much as many steps of a small robot.
        if now >= self._set_again:
            self._set_again = now + self._slack
            # Whoever looks from outside waits for another tenth: what this process says of itself is more.
            self._tell(now + self._patience + self._slack)
            _set_deadline(self, now + self._patience, self._report)

    def left(self) -> None:
        """Note that a call has ended; the time allowed continues until the next one begins."""

    def rest(self) -> None:
        """Watch no longer, until `alive` is called again."""
        self._set_again = 0.0
        self._tell(0)
        _set_deadline(self, None, self._report)

    def holds_its_file(self) -> bool:
        """Return True unless somebody else has closed the report."""
        return identity(self._report) == self._identity

    def close(self) -> None:
        """Watch no longer, for good."""
        self.rest()
        self._report.close()


class EndOfCopy(Watchdog):
    """Inert watchdog of a forked copy of a process. A rollout continues in one process alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def alive(self) -> None:
        with suppress(OSError):
            # Once for the session: an environment that forks does so in every step.
            os.close(os.open(self._folder / "forked", os.O_CREAT | os.O_EXCL))
            os.write(2, _FORKED)
        os._exit(0)

    rest = alive
    left = alive


_FORKED = (
    b"metaloom: the environment forked its process (os.fork) and the copy came back from the call as well; the copy is "
    b"ended each time, the run continues in the original\n"
)


def identity(file: io.FileIO | socket.socket) -> tuple[int, int] | None:
    """Return device and inode of an open file; None if its descriptor is closed."""
    try:
        about = os.fstat(file.fileno())
    except OSError:
        return None
    return about.st_dev, about.st_ino


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
