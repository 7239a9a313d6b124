"""Record of where a rollout is and which actions it took, in a file that outlives its process.

A worker that hangs, crashes or is killed cannot say where. What it wrote into a mapped page is the system's all the
same, and is read by whoever does the work again, or by the trainer.
"""

import faulthandler
import io
import itertools
import math
import mmap
import os
import re
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from distributed import get_worker

from metaloom.flows.rollouts.guard import NOT_YET, RESET, STOPPED, start_guard, started
from metaloom.pipeline.types import Array
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.stages.rollouts.sampler import RolloutWatch


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


# What `guard.py` reads as `Header`.
_HEADER = np.dtype(
    [
        *[("pid", "i8"), ("recorder", "i8"), ("env_step", "i8"), ("row", "i8"), ("shape", "i8", 3), ("first", "i8", 2)],
        *[("round", "i8", 2), ("episodes_per_task", "i8"), ("born", "f8"), ("deadline", "f8")],
    ]
)
_NO_FILE = (0, 0)
_POSITION = 16  # offset of env_step and row, after pid and recorder


@dataclass(frozen=True)
class Recording:
    """Progress of an attempt whose process ended.

    Attributes:
        pid: Process id.
        env_step: Step it was in, RESET before the first, NOT_YET while simulators were made.
        row: Row that was called; -1 where all rows are stepped together.
        first_task: Index of row 0's task in the meta-batch.
        first_episode: Index of row 0's episode within its task.
        actions: Actions [T, N, A] float32, zero after `env_step`; without rows when simulators were being made.
        timed_out: True if a watchdog ended the process, its own or the external one.
        stopped: True if the process was stopped then, as by SIGSTOP.
        closed: True if foreign descriptors were closed, so the process ended itself.
        traceback: Traceback that Python could still write; empty if there is none.
    """

    pid: int
    env_step: int
    row: int
    first_task: int
    first_episode: int
    actions: Array
    timed_out: bool
    stopped: bool
    closed: bool
    traceback: str

    @property
    def would_repeat(self) -> bool:
        """Nobody outside ended the process, so there is no use in another attempt."""
        return self.timed_out or self.closed

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Position where it ended, for comparison with other attempts."""
        return self.first_task, self.first_episode, self.env_step, self.row


class FlightRecorder(RolloutWatch):
    """Records a thread's rollouts, one after the other.

    The file and its pages are reused for the next rollout: recreating them costs a tenth of a small rollout.
    """

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        """Create a recorder at rest."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _report_crashes(folder)
        self._folder = folder
        self._number = next(_recorders)
        self._idle = folder / f"{os.getpid()}-{self._number}.idle"
        self._file = self._idle
        header = np.zeros((), _HEADER)
        header["pid"], header["recorder"], header["born"] = os.getpid(), self._number, started(os.getpid())
        self._map(0, header)
        self._watchdog = Watchdog(timeout_seconds, _timeout_report(folder, os.getpid(), self._number), self._tell)
        start_guard(folder)

    def begin(self, key: str, episodes_per_task: int) -> None:
        """Begin to record the rollout of this name, beside what earlier attempts at it left."""
        self._header["episodes_per_task"] = episodes_per_task
        self._header["env_step"], self._header["row"] = NOT_YET, -1
        self._header["shape"], self._header["first"] = 0, 0
        self._line = _scheduler_socket()
        self._line_identity = (self._line and identity(self._line)) or _NO_FILE
        self._move(self._folder / f"{key}.{len(_attempts(self._folder, key))}{_SUFFIX}")
        self._watchdog.alive()

    def actions(self, shape: tuple[int, int, int], position: RolloutPosition) -> Array:
        """Zeros [T, N, A] float32 in the file, for the episodes from a position on; the next ones overwrite them."""
        count = int(np.prod(shape))
        if count > len(self._floats):
            self._map(count, self._header)
        # The reset first: in between, the last step of the episodes before must not be taken for one of these.
        self._position[:] = RESET, -1
        self._header["shape"], self._header["first"] = shape, (position.first_task, position.first_episode)
        self._header["round"] = position.iteration, position.step
        self._floats[:count] = 0
        return self._floats[:count].reshape(shape)

    def idle(self) -> None:
        """Note that no environment is called until the next note: no time is limited."""
        self._watchdog.rest()

    def entered(self, env_step: int | None) -> None:
        """Note that the environments are about to be reset (None) or to take a step."""
        self._position[0] = RESET if env_step is None else env_step
        self._position[1] = -1
        self._watchdog.alive()

    def left(self) -> None:
        """Note that the environments have returned. A copy forked in that call must not write any action."""
        self._watchdog.left()

    def row(self, row: int) -> None:
        """Note that a row's environment is about to be called."""
        self._position[1] = row
        self._watchdog.alive()

    def finish(self) -> None:
        """Drop the recording: the rollout ended in a way that its process can report itself."""
        self._watchdog.rest()
        self._move(self._idle)

    def close(self) -> None:
        """Stop the watchdog and remove the file."""
        self._watchdog.close()
        self._file.unlink(missing_ok=True)

    def continue_as_a_copy(self) -> None:
        """End this process, which was forked in a call of an environment, when it comes back from that call."""
        self._position = self._position.copy()
        self._watchdog = EndOfCopy(self._folder)

    def _tell(self, deadline: float) -> None:
        line = self._line
        # What Dask closes it marks as closed. What somebody else closes or shuts down it notices never, or too late.
        same = line is None or identity(line) == self._line_identity
        alone = line is not None and (_is_shut_down(line) if same else line.fileno() < 0)
        if alone or not same or not self._watchdog.holds_its_file():
            why = _ALONE if alone else _CLOSED
            # Written by name, because the descriptors may have been reused. Gone if the run ended.
            with suppress(OSError):
                _crash_file(self._folder, os.getpid()).write_text(f"{why}\n", encoding="utf-8")
            os._exit(1)
        self._header["deadline"] = deadline

    def _map(self, count: int, header: Array) -> None:
        """Map a new file with room for `count` floats after the header."""
        aside = self._idle.with_suffix(".new")
        # Written, not only declared: a full disk is an error here, and a killed process when a page is first touched.
        aside.write_bytes(header.tobytes() + bytes(4 * count))
        with aside.open("r+b") as file:
            pages = mmap.mmap(file.fileno(), 0)
        os.replace(aside, self._file)
        self._header = np.frombuffer(pages, _HEADER, count=1).reshape(())
        # Field by field, writing into a structured array takes three times as long.
        self._position = np.frombuffer(pages, np.int64, count=2, offset=_POSITION)
        self._floats = np.frombuffer(pages, np.float32, offset=_HEADER.itemsize)

    def _move(self, to: Path) -> None:
        os.replace(self._file, to)
        self._file = to


class _WarmRecorder(threading.local):
    """The recorder of a thread's last session."""

    def __init__(self) -> None:
        self._of: tuple[Path, float] | None = None
        self._recorder: FlightRecorder | None = None

    def get(self, folder: Path, timeout_seconds: float) -> FlightRecorder:
        if self._recorder is None or self._of != (folder, timeout_seconds):
            if self._recorder is not None:
                self._recorder.close()
            self._recorder, self._of = FlightRecorder(folder, timeout_seconds), (folder, timeout_seconds)
        return self._recorder

    def forked(self) -> None:
        if self._recorder is not None:
            self._recorder.continue_as_a_copy()


_recorders = itertools.count()
_warm = _WarmRecorder()
os.register_at_fork(after_in_child=_warm.forked)


@contextmanager
def recorded(folder: Path, key: str, timeout_seconds: float, episodes_per_task: int = 1) -> Iterator[FlightRecorder]:
    """Record a rollout with this thread's recorder until the block is left."""
    recorder = _warm.get(folder, timeout_seconds)
    recorder.begin(key, episodes_per_task)
    try:
        yield recorder
    finally:
        recorder.finish()


def read_recordings(folder: Path, key: str) -> list[Recording]:
    """Read the recordings of a rollout's attempts whose processes ended, in order."""
    return [_read(file) for file in _attempts(folder, key)]


def recordings_folder(session: str) -> Path:
    """Return the folder of a session's recordings on this machine."""
    return Path(tempfile.gettempdir()) / f"metaloom-{session}"


def remove_recordings(session: str) -> None:
    """Remove the remains of a session on this machine."""
    shutil.rmtree(recordings_folder(session), ignore_errors=True)


_SUFFIX = ".recording"
_CLOSED = "File descriptors were closed that are not the environment's own, so its process was ended"
_ALONE = "The worker lost its connection to the scheduler in this call, so its process was ended"
_crash_lock = threading.Lock()
_crash_report: tuple[Path, io.FileIO] | None = None


def _scheduler_socket() -> socket.socket | None:
    """Return the socket by which the worker of this thread hears from its scheduler, if it is one and has one."""
    try:
        comm = get_worker().batched_stream.comm
    except ValueError:
        return None
    return cast(socket.socket | None, getattr(getattr(comm, "stream", None), "socket", None))


def _is_shut_down(line: socket.socket) -> bool:
    """Return True if both directions of a connection are shut down, as nobody but its own process does."""
    poll = select.poll()
    poll.register(line, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _attempts(folder: Path, key: str) -> list[Path]:
    names = (folder / f"{key}.{n}{_SUFFIX}" for n in itertools.count())
    return list(itertools.takewhile(Path.exists, names))


def _timeout_report(folder: Path, pid: int, recorder: int) -> Path:
    return folder / f"{pid}-{recorder}.timeout"


def _crash_file(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.crash"


def _read(file: Path) -> Recording:
    data = file.read_bytes()
    header = np.frombuffer(data, _HEADER, count=1)[0]
    shape = tuple(header["shape"].tolist())
    actions = np.frombuffer(data, np.float32, count=math.prod(shape), offset=_HEADER.itemsize).reshape(shape)
    timeout = _text(_timeout_report(file.parent, header["pid"], header["recorder"]))
    words = timeout or _text(_crash_file(file.parent, header["pid"]))
    # Of every thread's traceback, the one that collects rollouts, under the first line.
    first, *threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", words.partition("\nExtension modules:")[0])
    ours: Sequence[str] = [thread for thread in threads if "collect_rollouts" in thread] or threads
    return Recording(
        pid=int(header["pid"]),
        env_step=int(header["env_step"]),
        row=int(header["row"]),
        first_task=int(header["first"][0]),
        first_episode=int(header["first"][1]),
        actions=actions,
        timed_out=bool(timeout),
        stopped=timeout.startswith(STOPPED),
        closed=words.startswith(_CLOSED),
        traceback="\n".join([first.strip(), *(thread.strip() for thread in ours[:1])]).strip(),
    )


def _report_crashes(folder: Path) -> None:
    """Make Python write its tracebacks when a signal such as SIGSEGV ends this process."""
    global _crash_report
    file = _crash_file(folder, os.getpid())
    with _crash_lock:
        if _crash_report is None or _crash_report[0] != file:
            report = file.open("wb", buffering=0)
            faulthandler.enable(report)
            if _crash_report is not None:
                _crash_report[1].close()
            _crash_report = (file, report)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
