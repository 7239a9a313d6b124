"""Where a rollout is and which actions it took, in a file that outlives its process.

A worker that hangs, crashes or is killed cannot say where. What it wrote into a mapped page is the system's all the
same, and is read by whoever does the work again, or by the trainer.
"""

import faulthandler
import io
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.watchdog import Watchdog
from pipeline.types import Array

NOT_YET, RESET = -2, -1
_HEADER = np.dtype([("pid", "i8"), ("env_step", "i8"), ("row", "i8"), ("shape", "i8", 3)])


@dataclass(frozen=True)
class Recording:
    """How far an attempt came whose process ended.

    Attributes:
        env_step: the step it was in, RESET before the first, NOT_YET while simulators were made.
        row: the row that was called; -1 where all rows are stepped together.
        actions: [T, N, A] float32, zero behind `env_step`; without rows when simulators were being made.
        timed_out: the watchdog ended the process.
        traceback: what Python could still write about it; empty when the process ended without a word.
    """

    env_step: int
    row: int
    actions: Array
    timed_out: bool
    traceback: str

    @property
    def place(self) -> tuple[int, int]:
        """What to compare to see whether two attempts ended in the same place."""
        return self.env_step, self.row


class FlightRecorder:
    """Records one attempt at a rollout; a stages.collect_rollouts.RolloutWatch."""

    def __init__(self, folder: Path, key: str, timeout_seconds: float) -> None:
        """A recording of its own beside those of earlier attempts.

        Args:
            folder: where recordings are kept; made if it is not there.
            key: names the rollout.
            timeout_seconds: how long a call of an environment may take before the process is ended.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _report_crashes(folder)
        self._file = folder / f"{key}.{len(_attempts(folder, key))}{_SUFFIX}"
        self._watchdog = Watchdog(timeout_seconds, self._file.with_suffix(".timeout"))
        self._begin(np.zeros(3, np.int64))
        self._watchdog.alive()

    def actions(self, shape: tuple[int, int, int]) -> Array:
        """Zeros [T, N, A] float32 in the file."""
        self._begin(np.array(shape))
        return np.frombuffer(self._map, np.float32, offset=_HEADER.itemsize).reshape(shape)

    def entered(self, env_step: int | None) -> None:
        """The environments are about to be reset (None) or to take a step."""
        self._position[:] = (RESET if env_step is None else env_step, -1)
        self._watchdog.alive()

    def row(self, row: int) -> None:
        """The environment of a row is about to be called."""
        self._position[1] = row
        self._watchdog.alive()

    def finish(self) -> None:
        """The attempt came to an end that it can tell itself: nothing is kept."""
        self._watchdog.stop()
        for file in (self._file, self._file.with_suffix(".timeout")):
            file.unlink(missing_ok=True)

    def _begin(self, shape: Array) -> None:
        header = np.zeros((), _HEADER)
        header["pid"], header["env_step"], header["row"], header["shape"] = os.getpid(), NOT_YET, -1, shape
        # Written, not only declared: a full disk is an error here, and a killed process when a page is first touched.
        with self._file.open("wb") as file:
            file.write(header.tobytes())
            file.write(bytes(4 * int(np.prod(shape))))
        with self._file.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        start = _HEADER.fields["env_step"][1]  # pyright: ignore[reportOptionalSubscript]
        self._position = np.frombuffer(self._map, np.int64, count=2, offset=start)


def read_recordings(folder: Path, key: str) -> list[Recording]:
    """What the attempts at a rollout left behind whose processes ended, in their order."""
    return [_read(file) for file in _attempts(folder, key)]


def recordings_folder(session: str) -> Path:
    """Where a session's recordings are on this machine."""
    return Path(tempfile.gettempdir()) / f"metaloom-{session}"


def remove_recordings(session: str) -> None:
    """Remove what a session left on this machine."""
    shutil.rmtree(recordings_folder(session), ignore_errors=True)


_SUFFIX = ".recording"
_crash_lock = threading.Lock()
_crash_report: tuple[Path, io.FileIO] | None = None


def _attempts(folder: Path, key: str) -> list[Path]:
    return sorted(folder.glob(f"{key}.*{_SUFFIX}"), key=lambda file: int(file.name.split(".")[-2]))


def _read(file: Path) -> Recording:
    data = file.read_bytes()
    header = np.frombuffer(data, _HEADER, count=1)[0]
    shape = tuple(header["shape"].tolist())
    actions = np.frombuffer(data, np.float32, offset=_HEADER.itemsize).reshape(shape)
    timeout = _text(file.with_suffix(".timeout"))
    words = timeout or _text(file.parent / f"{header['pid']}.crash")
    return Recording(int(header["env_step"]), int(header["row"]), actions, bool(timeout), _rollout_thread(words))


def _report_crashes(folder: Path) -> None:
    """Have Python write where it was when a signal such as SIGSEGV ends this process."""
    global _crash_report
    file = folder / f"{os.getpid()}.crash"
    with _crash_lock:
        if _crash_report is None or _crash_report[0] != file:
            report = file.open("wb", buffering=0)
            faulthandler.enable(report)
            if _crash_report is not None:
                _crash_report[1].close()
            _crash_report = (file, report)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _rollout_thread(report: str) -> str:
    """Of every thread's traceback, the one that collects rollouts, under the first line."""
    first, *threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", report.partition("\nExtension modules:")[0])
    ours: Sequence[str] = [thread for thread in threads if "collect_rollouts" in thread] or threads
    return "\n".join([first.strip(), *(thread.strip() for thread in ours[:1])]).strip()
