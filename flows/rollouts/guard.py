"""Guard of worker processes, which runs as a separate process, one per machine and session.

A worker records a deadline for each environment call (`flight_recorder.py`). After the deadline, the guard requests
the worker's tracebacks and ends it, whatever the worker is doing. It also cleans up after a trainer that was killed.
This file imports neither Metaloom nor NumPy, so that the guard starts within the time of a step.
"""

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

MARK = "METALOOM_WORKER_OF"  # environment variable that marks worker processes and their descendants

NOT_YET, RESET = -2, -1
STOPPED = "Stopped"
TRACEBACK = signal.SIGUSR2
"""Signal that makes a worker write its threads' tracebacks, from C and therefore even while the GIL is held."""
_TRAINER = "trainer.json"
_ASKED = "asked_to_end"
_LOOK_EVERY_SECONDS = 0.2
HEADER = struct.Struct("=12q2d")  # layout of `Header`


class Header(NamedTuple):
    """Header of a recording, as written by `flight_recorder`: 12 integers and 2 times."""

    pid: int
    recorder: int
    env_step: int  # index of the environment step, NOT_YET or RESET
    row: int  # -1 if all rows are stepped together
    steps: int
    rows: int
    action_size: int
    first_task: int
    first_episode: int
    iteration: int
    step: int
    episodes_per_task: int
    born: float  # start time, as `started` returns it; together with the pid, it identifies the process
    deadline: float  # deadline of the current call on the monotonic clock; 0 for none

    @classmethod
    def read(cls, file: Path) -> "Header":
        """Return the header of a recording's file."""
        with file.open("rb") as opened:
            return cls(*HEADER.unpack(opened.read(HEADER.size)))

    def process(self) -> psutil.Process | None:
        """Return the recorded process if it is still running, otherwise None."""
        return _running(self.pid, self.born)

    def words(self) -> str:
        """Return a description of the rollout's position, for messages."""
        if self.env_step == NOT_YET:
            return "while it was being built"
        row = f"tasks from {self.first_task} on"
        if self.row >= 0:
            b, e = divmod(self.row, self.episodes_per_task)
            row = f"task {self.first_task + b}, episode {self.first_episode + e}"
        at = "in reset" if self.env_step == RESET else f"step {self.env_step}"
        return f"iteration {self.iteration}, inner step {self.step}: {row}, {at}"


def started(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, which does not depend on the system clock."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])


def register_trainer(folder: Path, mark: str, env: str) -> None:
    """Register this process as the trainer; if it is killed, the guard ends marked workers and removes the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    trainer = {"pid": os.getpid(), "born": started(os.getpid()), "mark": mark, "env": env}
    (folder / _TRAINER).write_text(json.dumps(trainer), encoding="utf-8")
    _trained.append(folder)


def note_requested_end() -> None:
    """Suppress the guard's report of a killed trainer, since the user asked this process to end."""
    for folder in _trained:
        with suppress(OSError):  # the folder of an earlier run is gone
            (folder / _ASKED).touch()


def start_guard(folder: Path) -> None:
    """Start a guard for the recordings in a folder, unless one is already running."""
    lock = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        # -P, because modules in this file's folder have the same names as installed packages.
        command = [sys.executable, "-P", __file__, str(folder)]
        quiet = subprocess.DEVNULL
        # The lock belongs to the open file, which the new process inherits.
        _started.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=[lock], start_new_session=True))
    finally:
        os.close(lock)


def end_marked(mark: str) -> int:
    """Kill all other processes that carry a mark; return the number of killed processes."""
    ended: set[int] = set()
    while found := [process for process in _marked(mark) if process.pid not in ended]:
        for process in found:
            ended.add(process.pid)
            with suppress(psutil.Error):
                process.kill()
    return len(ended)


_started: list[subprocess.Popen[bytes]] = []  # a Popen that is garbage-collected while its process runs warns
_trained: list[Path] = []


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        # Other users' processes cannot be read, and processes may end at any time.
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process


def _running(pid: int, born: float) -> psutil.Process | None:
    """Return the process with this ID and start time if it is still running, otherwise None."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if started(pid) == born and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _watch(folder: Path) -> None:
    trainer = _Trainer.of(folder)
    while folder.is_dir():
        headers: dict[Path, Header] = {}
        for file in folder.glob("*.*"):
            if file.suffix in (".recording", ".idle"):
                with suppress(OSError, struct.error):  # the file was just renamed
                    headers[file] = Header.read(file)
        for header in headers.values():
            _end_if_overdue(folder, header)
        if trainer is not None and _running(trainer.pid, trainer.born) is None:
            trainer.tidy_up(folder, [header for file, header in headers.items() if file.suffix == ".recording"])
        if trainer is None and not any(header.process() for header in headers.values()):
            return
        time.sleep(_LOOK_EVERY_SECONDS)


class _Trainer(NamedTuple):
    pid: int
    born: int
    mark: str
    env: str

    @classmethod
    def of(cls, folder: Path) -> "_Trainer | None":
        """Return a folder's registered trainer, or None if the trainer is on another machine."""
        file = folder / _TRAINER
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def tidy_up(self, folder: Path, headers: Sequence[Header]) -> None:
        """Clean up after a dead trainer: report which environments were being called, and end its processes."""
        found = "No environment was being called then."
        if headers:
            places = "".join(f"\n  {self.env}, {header.words()}" for header in headers)
            again = "If this happens again at the same point, an environment is killing the trainer."
            found = f"Environments that were being called then:{places}\n{again}"
        if not (folder / _ASKED).exists():
            sys.stderr.write(
                f"metaloom: the trainer's process was killed. {found} Stored data is safe: `metaloom resume` "
                "continues a run that `metaloom ls` lists\n"
            )
        end_marked(self.mark)
        shutil.rmtree(folder, ignore_errors=True)


def _end_if_overdue(folder: Path, header: Header) -> None:
    if not 0 < header.deadline < time.monotonic() or (process := header.process()) is None:
        return
    report = folder / f"{header.pid}-{header.recorder}.timeout"
    with suppress(psutil.Error, OSError):
        if report.stat().st_size:
            process.kill()
            return
        stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        report.write_text(f"{STOPPED if stopped else 'Timeout'}: ended from outside\n", encoding="utf-8")
        if stopped:
            process.kill()
        else:  # until the next check
            process.send_signal(TRACEBACK)


if __name__ == "__main__":
    # Ctrl-C is handled by the trainer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch(Path(sys.argv[1]))
