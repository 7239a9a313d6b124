"""Processes that run Prefect commands for `metaloom serve`. If one ends, all end."""

import ctypes
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import BinaryIO

# A failing server ends immediately. Creating the database takes 10 s, or minutes on a busy machine.
START_SECONDS = 600.0
STOP_SECONDS = 15.0

LOCK = "serve.lock"
# `prefect` commands hold the lock briefly to check it.
_LOOKED_AT_SECONDS = 0.5

_PR_SET_PDEATHSIG = 1
# If `metaloom serve` is killed, its parts must end to free the port. Only Linux can end a process with its parent.
_END_WITH_PARENT = (
    partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM) if sys.platform == "linux" else None
)


class ServeError(RuntimeError):
    """Error raised if a part fails to start or ends; the message names the part and its log."""


class Interrupted(Exception):
    """Exception raised if the user presses Ctrl-C while the parts are starting."""


@dataclass(frozen=True)
class Part:
    """Running process of a Prefect command; without a log file, it writes to this process's output."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path | None = None

    @property
    def code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self.process.poll()

    def explain(self, problem: str) -> ServeError:
        """Return an error that states the part's problem and includes the end of its log."""
        tail = [] if self.log is None else self.log.read_text(errors="replace").splitlines()[-15:]
        where = [f"; the end of {self.log}:", *tail] if tail else []
        return ServeError(f"{self.name} {problem}" + "\n".join(where))

    def require(self) -> None:
        """Raise ServeError if the process has ended; all parts must then be restarted."""
        if (code := self.code) is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise self.explain(
                f"ended ({how}), and so did `metaloom serve`; flow runs continue from what is stored when it is "
                "restarted, for example by systemd, Docker or Kubernetes (docs/operations.md)"
            )


@contextmanager
def running(
    name: str, arguments: Sequence[str], log: Path | None = None, inherits: tuple[int, ...] = ()
) -> Iterator[Part]:
    """Within the block, run a part; afterwards, end it and all processes that it has started.

    `arguments` are the name of a Python module and its arguments. Output goes to `log`, or to this process's output if
    it is None. The process inherits the file descriptors in `inherits` unchanged.
    """
    with nullcontext() if log is None else _opened(log) as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            # A separate session, so that Ctrl-C in a terminal only reaches this process, which stops parts in order.
            start_new_session=True,
            preexec_fn=_END_WITH_PARENT,
            pass_fds=inherits,
        )
        try:
            yield Part(name, process, log)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            # Kill the remaining processes of the group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class StopRequest(Event):
    """Request to stop, set by a signal.

    `for_good` is True if the user pressed Ctrl-C or closed the terminal. Service managers send SIGTERM and restart.
    """

    for_good = False

    def heard(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; the first one determines `for_good`."""
        if not self.is_set():
            self.for_good: bool = number != signal.SIGTERM
        self.set()


@contextmanager
def alone(folder: Path, home: Path) -> Iterator[None]:
    """Within the block, lock the folder: a second `metaloom serve` would treat running flow runs as abandoned."""
    deadline = time.monotonic() + _LOOKED_AT_SECONDS
    with _opened(home / LOCK) as file:
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServeError(
                    f"{folder} is being served by another `metaloom serve`; only one can run per folder. Stop it, or "
                    "start this one in another folder"
                )
            time.sleep(0.02)
        yield


def is_served(home: Path) -> bool:
    """Return True if a `metaloom serve` process of this user is running with this `.prefect` folder."""
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
        raise ServeError(f"{file} cannot be written ({error.strerror}); remove it") from None
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise ServeError(f"{file} is a pipe or a device, not a file; remove it")
    return opened


def _locked(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def say(words: str) -> None:
    """Print a line and flush it immediately."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
