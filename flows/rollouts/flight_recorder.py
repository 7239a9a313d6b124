"""Recording a rollout's position and actions in a memory-mapped file that outlives the process.

A worker that hangs, crashes or is killed cannot report where; the next attempt or the trainer reads the file.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from distributed import get_worker

from metaloom.flows.rollouts.guard import HEADER, NOT_YET, RESET, STOPPED, TRACEBACK, Header, start_guard, started
from metaloom.pipeline.types import Array
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.stages.rollouts.sampler import RolloutWatch

_FORKED = (
    b"metaloom: the environment forked its process (os.fork) and the copy also returned from the call; such copies are "
    b"ended, and the run continues in the original\n"
)


def identity(file: io.FileIO | socket.socket) -> tuple[int, int] | None:
    """Return the device and inode of an open file, or None if its descriptor is closed."""
    try:
        about = os.fstat(file.fileno())
    except OSError:
        return None
    return about.st_dev, about.st_ino


_NO_FILE = (0, 0)
# Offsets in the header: env_step and row, then sizes and the index of the first row.
_POSITION, _SIZES = Header._fields.index("env_step"), Header._fields.index("steps")


@dataclass(frozen=True)
class Recording:
    """Recorded progress of an attempt whose process ended."""

    at: Header
    actions: Array  # zero after `env_step`, empty if simulators were still being built, [T, N, A] float32
    timed_out: bool  # the guard ended the process
    stopped: bool  # the guard found the process suspended, for example by SIGSTOP
    closed: bool  # the process ended itself because file descriptors had been closed
    traceback: str  # written by Python; may be empty

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Position at which the process ended, for comparing attempts."""
        return self.at.first_task, self.at.first_episode, self.at.env_step, self.at.row


class FlightRecorder(RolloutWatch):
    """Records a thread's rollouts, one at a time; the guard ends a process whose environment call exceeds the timeout.

    The file is reused for the next rollout, since recreating it takes a tenth of the time of a small rollout.
    """

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _report_crashes(folder)
        self._folder, number = folder, next(_recorders)
        self._file = self._idle = folder / f"{os.getpid()}-{number}.idle"
        self._slack = min(1.0, timeout_seconds / 10)
        self._patience = timeout_seconds + self._slack
        self._set_again, self._is_copy = 0.0, False
        # The guard opens this file by name and writes into it why it ends the process.
        self._report = _timeout_report(folder, os.getpid(), number).open("wb", buffering=0)
        self._report_identity = identity(self._report)
        self._line: socket.socket | None = None
        self._map(0, HEADER.pack(os.getpid(), number, *[0] * (len(Header._fields) - 4), started(os.getpid()), 0))

    def begin(self, key: str, episodes_per_task: int) -> None:
        """Start recording the rollout `key`; recordings of earlier attempts are kept."""
        self._whole[_POSITION:] = NOT_YET, -1, *[0] * 7, episodes_per_task
        self._line = _scheduler_socket()
        self._line_identity = (self._line and identity(self._line)) or _NO_FILE
        self._move(self._folder / f"{key}.{len(_attempts(self._folder, key))}{_SUFFIX}")
        self._alive()

    def actions(self, shape: tuple[int, int, int], position: RolloutPosition) -> Array:
        """Return a zeroed buffer in the mapped file for the actions at `position`, [T, N, A] float32.

        It is valid until the next call.
        """
        count = int(np.prod(shape))
        if count > len(self._floats):
            self._map(count, self._whole.tobytes() + self._times.tobytes())
        # Record the reset first, so that the last step of previous episodes is not attributed to these.
        self._position[:] = RESET, -1
        self._whole[_SIZES:-1] = *shape, position.first_task, position.first_episode, position.iteration, position.step
        self._floats[:count] = 0
        return self._floats[:count].reshape(shape)

    def idle(self) -> None:
        # Disable the time limit until `_alive` is called.
        self._set_again = 0.0
        self._allow(0)

    def entered(self, env_step: int | None) -> None:
        self._position[0] = RESET if env_step is None else env_step
        self._position[1] = -1
        self._alive()

    def left(self) -> None:
        """End this process if it is a copy forked in the environments' call, since copies must not write actions."""
        if self._is_copy:
            self._end_copy()

    def row(self, row: int) -> None:
        self._position[1] = row
        self._alive()

    def finish(self) -> None:
        """Discard the recording, since the process can report the rollout's end itself."""
        self.idle()
        self._move(self._idle)

    def close(self) -> None:
        """Close the recorder and remove its file."""
        self.idle()
        self._report.close()
        self._file.unlink(missing_ok=True)

    def continue_as_a_copy(self) -> None:
        """Make this process, a copy forked during an environment call, end when the call returns."""
        self._position = self._position.copy()
        self._is_copy, self._set_again = True, 0.0

    def _end_copy(self) -> None:
        with suppress(OSError):
            # Once per session, since an environment that forks may do so in every step.
            os.close(os.open(self._folder / "forked", os.O_CREAT | os.O_EXCL))
            os.write(2, _FORKED)
        os._exit(0)

    def _alive(self) -> None:
        """Restart the current call's timer."""
        now = time.monotonic()
        # Checking descriptors and the guard takes as long as a step of a small robot.
        if now >= self._set_again:
            self._set_again = now + self._slack
            self._allow(now + self._patience)
            with suppress(OSError):  # the run may have ended
                start_guard(self._folder)

    def _allow(self, deadline: float) -> None:
        if self._is_copy:
            self._end_copy()
        line = self._line
        # Dask knows which sockets it has closed, but not which ones others have closed, and notices shutdowns late.
        same = line is None or identity(line) == self._line_identity
        alone = line is not None and (_is_shut_down(line) if same else line.fileno() < 0)
        if alone or not same or identity(self._report) != self._report_identity:
            why = _ALONE if alone else _CLOSED
            # Written by path, because descriptors may have been reused. The folder is missing if the run has ended.
            with suppress(OSError):
                _crash_file(self._folder, os.getpid()).write_text(f"{why}\n", encoding="utf-8")
            os._exit(1)
        # The guard found that the last call took too long, and is about to end this process.
        if os.fstat(self._report.fileno()).st_size:
            os._exit(1)
        self._times[1] = deadline

    def _map(self, count: int, header: bytes) -> None:
        """Map a new file with `count` floats after the header."""
        aside = self._idle.with_suffix(".new")
        # Write all bytes instead of only setting the size: a full disk raises an error here, but would kill the process
        # when it first uses a page.
        aside.write_bytes(header + bytes(4 * count))
        with aside.open("r+b") as file:
            pages = mmap.mmap(file.fileno(), 0)
        os.replace(aside, self._file)
        self._whole = np.frombuffer(pages, np.int64, count=len(Header._fields) - 2)
        self._position = self._whole[_POSITION:_SIZES]
        self._times = np.frombuffer(pages, np.float64, count=2, offset=self._whole.nbytes)
        self._floats = np.frombuffer(pages, np.float32, offset=HEADER.size)

    def _move(self, to: Path) -> None:
        os.replace(self._file, to)
        self._file = to


class _WarmRecorder(threading.local):
    """A thread's recorder, cached for its last session."""

    _of: tuple[Path, float] | None = None
    _recorder: FlightRecorder | None = None

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
    """Yield this thread's recorder, which records the rollout `key` until the end of the block."""
    recorder = _warm.get(folder, timeout_seconds)
    recorder.begin(key, episodes_per_task)
    try:
        yield recorder
    finally:
        recorder.finish()


def read_recordings(folder: Path, key: str) -> list[Recording]:
    """Return the recordings of earlier attempts at a rollout, oldest first."""
    return [_read(file) for file in _attempts(folder, key)]


def recordings_folder(session: str) -> Path:
    """Return the folder of a session's recordings on this machine."""
    return Path(tempfile.gettempdir()) / f"metaloom-{session}"


def remove_recordings(session: str) -> None:
    shutil.rmtree(recordings_folder(session), ignore_errors=True)


_SUFFIX = ".recording"
_CLOSED = "The environment closed file descriptors that it had not opened, so its process was ended"
_ALONE = "The worker lost its connection to the scheduler during this call, so its process was ended"
_crash_lock = threading.Lock()
_crash_report: tuple[Path, io.FileIO] | None = None


def _scheduler_socket() -> socket.socket | None:
    """Return the socket to the scheduler if this thread belongs to a worker, otherwise None."""
    try:
        comm = get_worker().batched_stream.comm
    except ValueError:
        return None
    return cast(socket.socket | None, getattr(getattr(comm, "stream", None), "socket", None))


def _is_shut_down(line: socket.socket) -> bool:
    """Return True if both directions of a connection are shut down, which only this process can do."""
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
    at = Header.read(file)
    shape = at.steps, at.rows, at.action_size
    actions = np.fromfile(file, np.float32, math.prod(shape), offset=HEADER.size).reshape(shape)
    timeout = _text(_timeout_report(file.parent, at.pid, at.recorder))
    words = timeout + _text(_crash_file(file.parent, at.pid))
    # From the tracebacks of all threads, select the one that collects rollouts.
    first, *threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", words.partition("\nExtension modules:")[0])
    ours: Sequence[str] = [thread for thread in threads if "collect_rollouts" in thread] or threads
    return Recording(
        at=at,
        actions=actions,
        timed_out=bool(timeout),
        stopped=timeout.startswith(STOPPED),
        closed=words.startswith(_CLOSED),
        traceback="\n".join([first.strip(), *(thread.strip() for thread in ours[:1])]).strip(),
    )


def _report_crashes(folder: Path) -> None:
    """Make Python write tracebacks when a signal such as SIGSEGV ends this process or the guard requests them."""
    global _crash_report
    file = _crash_file(folder, os.getpid())
    with _crash_lock:
        if _crash_report is None or _crash_report[0] != file:
            report = file.open("wb", buffering=0)
            faulthandler.enable(report)
            faulthandler.register(TRACEBACK, report)
            if _crash_report is not None:
                _crash_report[1].close()
            _crash_report = (file, report)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
