"""Advisory lock that names a run's writer, and requests to stop the writer.

The lock keeps cooperating writers from writing at once. Sessions guard against a writer that lost its lock without
noticing (a stopped process, a host that came back); see `metaloom.storage.write.sessions`.
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from metaloom.storage.errors import DamagedRun, RunLocked, linked
from metaloom.storage.format.files import lock, read_file, render
from metaloom.storage.format.places import argument
from metaloom.storage.format.provenance import utc
from metaloom.storage.format.sessions import sessions_in
from metaloom.storage.remote.log import RemoteLog

FOLDER = "_operator"  # folder for files that are not part of a run's content: its log, and requests to its writer

LOCK_NAME = "writer.lock"
_LARGEST = 4096
_NO_WRITER = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors raised when parsing text that no writer has written."""


@dataclass(frozen=True)
class Writer:
    """Process that holds a run's lock."""

    host: str
    pid: int
    since: str  # UTC, ISO 8601
    token: str  # token of its session
    process_started: int | None = None  # start time in clock ticks since the machine booted; None if unknown
    boot: str = ""  # identifier of that boot; "" if unknown
    listens: bool = True  # False for writers of earlier versions, which do not poll for stop requests

    @classmethod
    def parse(cls, owner: Mapping[str, Any], token: object) -> Self:
        """Parse the content of a lock, or of the log entry that begins a session."""
        started = owner.get("process_started")
        known = started if isinstance(started, int) else None
        who = str(owner["host"]), int(owner["pid"]), str(owner["since"])
        return cls(*who, str(token), known, str(owner.get("boot", "")), "process_started" in owner)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since[:19]}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_stopped(self) -> bool:
        """True if the process is known to be suspended, e.g. by Ctrl-Z, so that it does not react to requests."""
        return self.is_here and _process(self.pid)[0] in ("T", "t")

    @property
    def is_alive(self) -> bool:
        """False if the process is known to have ended: it is gone, or its id has been reused."""
        if not self.is_here:
            return True  # cannot be determined from here
        if self.boot and self.boot != (_boot() or self.boot):
            return False
        state, started = _process(self.pid)
        if state in ("Z", "X") or not _exists(self.pid):  # a zombie has closed all its files
            return False
        return self.process_started is None or started in (None, self.process_started)


def owner_document(token: str) -> dict[str, Any]:
    who = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc(), "token": token}
    return who | {"process_started": _process(os.getpid())[1], "boot": _boot()}


def current_writer(root: Path, remote: RemoteLog | None = None) -> Writer | None:
    """Return the process that is writing a run, according to its lock, or None.

    The lock is not acquired, because a writer that starts now must find it free. A stale lock on this host is
    recognized because its process is gone. Writers on other machines are found in the run's log.
    """
    try:
        owner = json.loads(read_file(root / LOCK_NAME, limit=_LARGEST))
        writer = Writer.parse(owner, owner["token"])
    except (DamagedRun, OSError, *_NO_WRITER):
        writer = None
    if writer is not None and writer.is_alive:
        return writer
    elsewhere = remote.owner if remote is not None else None
    if remote is None or elsewhere is None or remote.is_own(elsewhere.session):
        return None
    try:
        return Writer.parse(elsewhere.about, elsewhere.session)
    except _NO_WRITER:
        return None


def was_killed(root: Path, remote: RemoteLog | None = None) -> bool:
    """Return True if a run's newest session is not closed although no process is writing the run."""
    sessions = sessions_in(root)
    is_open = (bool(sessions) and not sessions[-1].closed) or (remote is not None and remote.owner is not None)
    # Check the lock last: a new writer acquires it before creating its session.
    return is_open and current_writer(root, remote) is None


def operator_folder(root: Path) -> Path:
    """Create and return the folder for files outside the run's content. Raises DamagedRun if it is a link."""
    folder = root / FOLDER
    if folder.is_symlink():
        raise linked(folder)
    folder.mkdir(exist_ok=True)  # need not be durable
    return folder


def ask_to_stop(root: Path, token: str) -> None:
    """Ask the session `token` to stop, and remove requests to others. Raises the same errors as `operator_folder`."""
    folder, request = operator_folder(root), _request(root, token)
    for old in folder.glob("stop-*"):
        if old != request:
            old.unlink(missing_ok=True)
    part = folder / f"{secrets.token_hex(8)}.part"
    part.touch(exist_ok=False)
    os.replace(part, request)


def is_asked_to_stop(root: Path, token: str) -> bool:
    return _request(root, token).exists()


def withdraw(root: Path, token: str) -> None:
    """Withdraw the stop request to the session with this token."""
    _request(root, token).unlink(missing_ok=True)


def _request(root: Path, token: str) -> Path:
    return root / FOLDER / f"stop-{token}"


def _process(pid: int) -> tuple[str, int | None]:
    """Return a local process's state and its start in clock ticks; "" and None if unknown."""
    try:
        # Fields 3 and 22; the program's name, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):  # no such process, or a system without /proc
        return "", None


def _boot() -> str:
    """Return an identifier of this machine's current boot; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


@dataclass(frozen=True)
class WriterLock:
    """Lock that this process has acquired."""

    path: Path
    descriptor: int

    def is_held(self) -> bool:
        """Return True if no other process has taken over the run."""
        return _is_file_at(self.descriptor, self.path)

    def release(self) -> None:
        try:
            # Empty it rather than remove it, because it may be the lock of a writer that has taken over.
            os.ftruncate(self.descriptor, 0)
        finally:
            os.close(self.descriptor)  # releases the lock even if the file cannot be emptied


def acquire_lock(path: Path, token: str, *, take_over: bool) -> WriterLock:
    """Lock a run for writing. If another process holds the lock, raise RunLocked or, with `take_over`, replace it."""
    owner = render(owner_document(token))
    if take_over:
        new = path.with_name(f"{path.name}.{token}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        lock(descriptor, wait=False)
        _write_owner(descriptor, owner)
        os.replace(new, path)
        return WriterLock(path, descriptor)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except IsADirectoryError:  # a folder is never a lock; removed only if empty
            os.rmdir(path)
            continue
        try:
            lock(descriptor, wait=False)
        except BlockingIOError:
            holder = os.pread(descriptor, _LARGEST, 0)
            os.close(descriptor)
            raise _locked(path, holder) from None
        # The file may have been removed or replaced between opening and locking.
        if _is_file_at(descriptor, path):
            _write_owner(descriptor, owner)
            return WriterLock(path, descriptor)
        os.close(descriptor)


def _write_owner(descriptor: int, owner: bytes) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
    except OSError:
        os.close(descriptor)  # the disk is full; the file stays locked while it is open
        raise


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _locked(path: Path, holder: bytes) -> RunLocked:
    try:
        owner = json.loads(holder)
        who = f"process {owner['pid']} on {owner['host']} has been writing it since {owner['since']}"
    except _NO_WRITER:
        who = "another process is about to write it"
    return RunLocked(
        path.parent,
        found=who,
        required="no other writer",
        action=f"Wait for it or stop it. If its host is dead: `metaloom resume {argument(path.parent)} --take-over`",
    )
