"""One writer per run: an advisory lock that says who holds it.

The lock keeps honest writers apart. What makes a writer harmless that lost its lock without noticing (a stopped
process, a host that came back) is the session it publishes from; see `metaloom.storage.write.sessions`.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from metaloom.storage.errors import RunLocked
from metaloom.storage.format.canonical import render
from metaloom.storage.format.files import flags, lock
from metaloom.storage.format.places import argument
from metaloom.storage.write.holder import owner_document

_LARGEST = 4096


@dataclass(frozen=True)
class WriterLock:
    """A held lock."""

    path: Path
    descriptor: int

    def is_held(self) -> bool:
        """Tell whether nobody has taken the run over."""
        return _is_file_at(self.descriptor, self.path)

    def release(self) -> None:
        """Let the next writer in."""
        try:
            # Emptied and not removed: by now it may be the lock of a writer that has taken over.
            os.ftruncate(self.descriptor, 0)
        finally:
            os.close(self.descriptor)  # what lets the next writer in, whether or not the file can be emptied


def acquire_lock(path: Path, token: str, *, take_over: bool) -> WriterLock:
    """Lock a run for writing.

    Args:
        path: the lock file.
        token: identifies the new holder.
        take_over: put a new lock in place of one that a lost host still holds.

    Raises:
        RunLocked: another process holds it.
    """
    owner = render(owner_document(token))
    if take_over:
        return _replace_lock(path, token, owner)
    while True:
        try:
            descriptor = os.open(path, flags("O_RDWR", "O_CREAT", "O_NOFOLLOW", "O_CLOEXEC"), 0o666)
        except IsADirectoryError:  # no lock was ever one; goes only if it is empty
            os.rmdir(path)
            continue
        try:
            lock(descriptor, path, wait=False)
        except BlockingIOError:
            holder = os.pread(descriptor, _LARGEST, 0)
            os.close(descriptor)
            raise _locked(path, holder) from None
        # Its holder may have removed the file, or another writer replaced it, between opening and locking.
        if _is_file_at(descriptor, path):
            _write_owner(descriptor, owner)
            return WriterLock(path, descriptor)
        os.close(descriptor)


def _replace_lock(path: Path, token: str, owner: bytes) -> WriterLock:
    new = path.with_name(f"{path.name}.{token}")
    descriptor = os.open(new, flags("O_RDWR", "O_CREAT", "O_EXCL", "O_CLOEXEC"), 0o666)
    lock(descriptor, new, wait=False)
    _write_owner(descriptor, owner)
    os.replace(new, path)
    return WriterLock(path, descriptor)


def _write_owner(descriptor: int, owner: bytes) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
    except OSError:
        os.close(descriptor)  # a full disk: as long as it is open, it stays locked
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
    except (ValueError, KeyError, TypeError, RecursionError):
        who = "another process is about to write it"
    return RunLocked(
        path.parent,
        found=who,
        required="one writer at a time",
        action=f"Wait for it or stop it. If its host is dead: `metaloom resume {argument(path.parent)} --take-over`",
    )
