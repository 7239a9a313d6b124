"""The processes of `metaloom serve`: Prefect commands that are restarted when they end."""

import ctypes
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import BinaryIO

# A failing server ends immediately. Creating the database takes 10 s, or minutes on a busy machine.
START_SECONDS = 600.0
STOP_SECONDS = 15.0
# Immediately at first; up to a minute for a part that ends repeatedly.
PAUSES = (0.0, 2.0, 5.0, 15.0, 60.0)
# A part that ran this long counts as started.
LASTED_SECONDS = 60.0
# Time after which a part counts as stuck. A busy server responds within Prefect's own time limits.
STUCK_SECONDS = 90.0

LOCK = "serve.lock"
# `prefect` commands hold it briefly to check it.
_LOOKED_AT_SECONDS = 0.5

_PR_SET_PDEATHSIG = 1
# If `metaloom serve` is killed, its parts must end to free the port. Only Linux can end a process with its parent.
_END_WITH_PARENT = (
    partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM) if sys.platform == "linux" else None
)


class ServeError(RuntimeError):
    """Raised if a part did not start or ended; names the part and its log."""


@dataclass
class Part:
    """A Prefect command, run as a process.

    Attributes:
        name: Name in messages.
        arguments: Arguments of Python: a module and its arguments.
        log: File for its output; None: this process's output.
        answers: Function that returns True if the process works; by default True for a live process.
        ended: Function called when it has ended by itself, before it is restarted.
        inherits: File descriptors that the process inherits unchanged.
    """

    name: str
    arguments: list[str]
    log: Path | None = None
    answers: Callable[[], bool] = lambda: True
    ended: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    inherits: tuple[int, ...] = ()
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _output: BinaryIO | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    # Time of the first failed check since the last successful one.
    _silent: float | None = field(default=None, init=False)
    _due: float | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _lost: float | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process."""
        if self.log is not None:
            self._output = _opened(self.log)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output else None,
            # A separate group: Ctrl-C in a terminal only reaches this process, which stops the parts in order.
            start_new_session=True,
            preexec_fn=_END_WITH_PARENT,
            pass_fds=self.inherits,
        )
        self._began = self.clock()
        self._due = self._silent = None

    def stop(self) -> None:
        """End the process and its children."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            # Remaining processes of the group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def lives(self) -> bool:
        """True while the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def explain(self, problem: str) -> ServeError:
        """Build the error for a problem, with the end of the log."""
        if self.log is None:
            return ServeError(f"{self.name} {problem}")
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return ServeError("\n".join([f"{self.name} {problem}; the end of {self.log}:", *tail]))

    def revive(self, say: Callable[[str], None]) -> bool:
        """Restart the process if it has ended or is stuck. Return True if it works."""
        now = self.clock()
        if self._due is not None:
            if now >= self._due:
                self.start()
            return False
        if (code := self.code) is not None:
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._bury(f"ended ({reason})", now, say)
            return False
        if self.answers():
            self._silent = None
            if self._lost is not None:
                say(f"{self.name} is back after {now - self._lost:.0f} s")
                self._lost = None
            return True
        self._silent = now if self._silent is None else self._silent
        if now - self._silent > STUCK_SECONDS:
            self._bury(f"has not answered for {STUCK_SECONDS:.0f} s", now, say)
        return False

    def _bury(self, what: str, now: float, say: Callable[[str], None]) -> None:
        self._failures = 0 if now - self._began > LASTED_SECONDS else self._failures
        pause = PAUSES[min(self._failures, len(PAUSES) - 1)]
        self._failures += 1
        where = f"; its log: {self.log}" if self.log else ""
        say(f"{self.name} {what}; starting it again {f'in {pause:.0f} s' if pause else 'now'}{where}")
        self._lost = now if self._lost is None else self._lost
        self.stop()
        self.ended()
        self._due = now + pause


class Stop(Event):
    """Request to stop, set by a signal.

    Attributes:
        for_good: True if a user requested it (Ctrl-C, closed terminal). Service managers send SIGTERM and restart.
    """

    for_good = True

    def heard(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; the first one decides."""
        if not self.is_set():
            self.for_good: bool = number != signal.SIGTERM
        self.set()


@contextmanager
def running(part: Part) -> Iterator[Part]:
    """Run a part during the block."""
    with ExitStack() as stack:
        stack.callback(part.stop)
        part.start()
        yield part


@contextmanager
def alone(folder: Path, home: Path) -> Iterator[None]:
    """Lock the folder: another `metaloom serve` would take running trainings for left-over ones and restart them."""
    deadline = time.monotonic() + _LOOKED_AT_SECONDS
    with _opened(home / LOCK) as file:
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServeError(
                    f"{folder} is being served by another `metaloom serve`; required one for a folder. Stop it, or "
                    "start this one in another folder"
                )
            time.sleep(0.02)
        yield


def is_served(home: Path) -> bool:
    """Return True if a `metaloom serve` of this user holds this `.prefect` folder now."""
    try:
        with open(os.open(home / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            is_own = os.fstat(file.fileno()).st_uid == os.geteuid()
            # Shared, so that concurrent checks do not conflict.
            return is_own and not _locked(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _opened(file: Path) -> BinaryIO:
    """Open a file for appending, without following links or blocking on a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.fdopen(os.open(file, flags, 0o600), "ab")
    except OSError as error:
        raise ServeError(f"{file} cannot be written ({error.strerror}); required a file. Remove it") from None
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise ServeError(f"{file} is a pipe or a device; required a file. Remove it")
    return opened


def _locked(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
