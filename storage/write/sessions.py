"""Writing sessions: files are published atomically, and only until a later session begins.

A writer first writes files into its session's folder, then publishes each by one system call: a rename for data, an
exclusive link for records. Opening a run for writing renames the folders of all earlier sessions, so later calls by an
earlier writer refer to files that no longer exist, and fail.

The session with the higher number is the later one. A session claims a number by exclusively creating a file, creates
its folder, and only then looks for other sessions. Of two sessions, at least one therefore sees the other: the later
one closes the folder of the earlier one, or the earlier one sees the later one's claim and gives up.
"""

import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, fenced_out
from metaloom.storage.format.files import Content, make_folder, render, sealed, sync_folder
from metaloom.storage.format.provenance import utc, versions
from metaloom.storage.format.records import MOST_SESSIONS
from metaloom.storage.format.sessions import (
    ABOUT,
    CLOSED,
    FOLDER,
    PART_NAME,
    Head,
    SessionName,
    session_number,
    stray_sessions,
)
from metaloom.storage.remote.log import RemoteLog
from metaloom.storage.remote.session import RemoteSession
from metaloom.storage.write.holder import WriterLock, acquire_lock

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _create(path: Path, content: Content) -> int:
    """Write a new file; return its descriptor, which the caller must sync and close."""
    descriptor = os.open(path, _CREATE, 0o666)
    try:
        for piece in content:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_MOST_ATTEMPTS = 100


@dataclass
class Session:
    """Permission to write a run, until the session is closed or another one begins.

    All writing methods raise FencedOut if a later session has begun. For a run in object storage, `remote` is the part
    of the session that writes the log.
    """

    root: Path
    number: int
    token: str
    lock: WriterLock
    remote: RemoteSession | None = None
    _changed: dict[Path, Path | None] = field(default_factory=dict[Path, Path | None], init=False)
    _parts: int = field(default=0, init=False)
    _facts: dict[str, Any] = field(default_factory=dict[str, Any], init=False)

    @property
    def folder(self) -> Path:
        return self.root / FOLDER / str(SessionName(self.number, self.token))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write the session's description, which contains these and earlier facts."""
        self._facts = {"started": utc(), **self._facts, **facts}
        about = {"schema": "metaloom/1", "token": self.token, "versions": versions(), **self._facts}
        self.put({self.folder / ABOUT: (render(sealed(about)),)})

    def seal(self, head: Head | None) -> None:
        """Record the newest record, so that its loss is detected. Nothing may be published afterwards."""
        self.describe({"sealed": True, **({"head": head.document()} if head else {})})
        self.share()

    def write_aside(self, contents: Iterable[Content]) -> list[Path]:
        """Write files durably into the session's folder and return their paths.

        All files are written before the first sync, so that the disk handles them together.
        """
        paths: list[Path] = []
        descriptors: list[int] = []
        with self.explained(), ExitStack() as opened:
            for content in contents:
                paths.append(self._next_part())
                descriptors.append(_create(paths[-1], content))
                opened.callback(os.close, descriptors[-1])
            for descriptor in descriptors:
                os.fsync(descriptor)
        return paths

    def replace(self, parts: Sequence[Path], targets: Sequence[Path]) -> None:
        """Move written files to their targets, replacing leftovers of interrupted sessions."""
        with self.explained():
            for part, target in zip(parts, targets, strict=True):
                os.replace(part, target)
            for folder in {target.parent for target in targets}:  # may be the session's own
                sync_folder(folder)
        self._note(targets)

    def put(self, contents: Mapping[Path, Content]) -> None:
        """Write files durably at paths in existing folders, replacing leftovers of interrupted sessions."""
        self.replace(self.write_aside(contents.values()), [*contents])

    def publish(self, content: bytes, target: Path) -> None:
        """Create a file atomically and durably. Raises FileExistsError if the path exists."""
        (part,) = self.write_aside([(content,)])
        with self.explained():
            os.link(part, target)
        sync_folder(target.parent)
        part.unlink(missing_ok=True)
        self._note([target])

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files, skipping missing ones.

        Until the file's folder or the session's folder is synced (as `describe` does), a removed file may reappear
        after a power failure.
        """
        for path in paths:
            part = self._next_part()
            self._note([path])
            with suppress(FileNotFoundError), self.explained():
                # Rename it into the session's folder, so that a superseded writer cannot remove a later one's files.
                os.rename(path, part)
                _discard(part)

    def write_folder(self, contents: Iterable[tuple[str, Content]]) -> Path:
        """Write a folder of files durably into the session's folder, one file at a time, and return its path."""
        part = self._next_part()
        folders = [part]
        with self.explained():
            part.mkdir()
            for name, content in contents:
                path = part / name
                parents = [folder for folder in path.parents if folder.is_relative_to(part)]
                for folder in (folder for folder in reversed(parents) if folder not in folders):
                    folder.mkdir()
                    folders.append(folder)
                descriptor = _create(path, content)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            for folder in reversed(folders):
                sync_folder(folder)
        return part

    def place_folder(self, part: Path, target: Path) -> None:
        """Move a written folder to its target, which must not exist."""
        with self.explained():
            os.rename(part, target)
        sync_folder(target.parent)
        if self.remote is not None:
            self._note(path for path in target.rglob("*") if path.is_file())

    def link(self, paths: Mapping[Path, Path]) -> None:
        """Hard-link files to additional paths through the session's folder, skipping missing files."""
        for path, target in paths.items():
            part = self._next_part()
            with suppress(FileNotFoundError), self.explained():
                os.link(path, part)
                os.replace(part, target)
            # POSIX: renaming to another link of the same file does nothing and leaves both.
            part.unlink(missing_ok=True)
            if self.remote is not None:  # the object exists even if its local copy does not
                self._changed[target] = path
        for folder in {target.parent for target in paths.values()}:
            sync_folder(folder)

    def follow(self, log: RemoteLog) -> None:
        """Update the cache from the log through the session, so that a superseded session changes nothing."""
        self.remove(log.surplus())
        missing = log.missing_texts()
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.remove(path for path in missing if path.is_dir())
        self.put({path: (raw,) for path, raw in missing.items()})
        self._changed.clear()  # the log already contains these changes

    def share(self) -> None:
        """Send changes since the last call to object storage, if the run is stored there."""
        if self.remote is not None:
            self.remote.commit(self._changed)
        self._changed.clear()

    def share_all(self) -> None:
        """Send all differences to object storage, if the run is stored there."""
        if self.remote is not None:
            self.remote.commit_all()
        self._changed.clear()

    def close(self) -> None:
        try:
            if self.remote is not None:
                self.remote.end()
            _close_folder(self.folder)
        finally:
            self.lock.release()

    def _note(self, paths: Iterable[Path]) -> None:
        if self.remote is not None:
            self._changed.update(dict.fromkeys(paths))

    def _next_part(self) -> Path:
        self._parts += 1
        return self.folder / f"{self._parts:08d}.part"

    @contextmanager
    def explained(self) -> Generator[None]:
        """Within the block, raise FencedOut for a missing file if a later session has begun, otherwise the error."""
        try:
            yield
        except FileNotFoundError as error:
            if self.folder.is_dir():
                raise
            raise fenced_out(self.root, self.number) from error


def begin_session(root: Path, *, take_over: bool) -> Session:
    """End every earlier session of a run and begin a new one.

    Raises RunLocked if another process is writing the run, FencedOut if another session took over while this one began,
    and StorageFailed if object storage cannot be written.
    """
    token = secrets.token_hex(8)
    lock = acquire_lock(root / "writer.lock", token, take_over=take_over)
    remote: RemoteSession | None = None
    with ExitStack() as undo:
        undo.callback(lock.release)
        if log := RemoteLog.of(root):
            remote = RemoteSession.begin(log, token, take_over=take_over)
            undo.callback(remote.end)
        session = Session(root, _begin(root, token, lock), token, lock, remote)
        if log:
            session.follow(log)
        undo.pop_all()  # the session has begun
    return session


def _begin(root: Path, token: str, lock: WriterLock) -> int:
    """Create a session later than all others, close the others, and return its number."""
    make_folder(root / FOLDER)
    number = -1
    for _ in range(_MOST_ATTEMPTS):
        number = _claim(root / FOLDER)
        own = root / FOLDER / str(SessionName(number, token))
        make_folder(own)
        # Close only sessions that exist now: one that begins afterwards is later than this one.
        names = os.listdir(root / FOLDER)
        latest = max(map(session_number, names))
        if latest == number and lock.is_held():
            for name in names:
                if (other := SessionName.parse(name)) and other.token != token and not other.closed:
                    _close_folder(root / FOLDER / name)
            return number
        _close_folder(own)
        # The holder of the lock retries, since the later session may have given up.
        if not lock.is_held():
            break
    raise fenced_out(root, number)


def _claim(sessions: Path) -> int:
    names = os.listdir(sessions)
    for name, previous in stray_sessions(sessions, names):
        raise _too_far(sessions / name, f"session {session_number(name)}, while the previous one is {previous}")
    number = max(map(session_number, names), default=-1) + 1
    if number >= MOST_SESSIONS:
        raise _too_far(sessions, f"session {number - 1}")
    while True:
        try:
            os.close(os.open(sessions / f"{number:06d}.claim", _CREATE, 0o666))
            return number
        except FileExistsError:
            number += 1


def _too_far(where: Path, found: str) -> DamagedRun:
    return DamagedRun(
        where,
        found=f"names {found}",
        required=f"a number below {MOST_SESSIONS} that continues the sequence of earlier sessions",
        action="If `metaloom verify` reports that it does not belong to the run, it contains no data of the run: "
        "remove it",
    )


def _close_folder(folder: Path) -> None:
    closed = folder.with_name(folder.name + CLOSED)
    try:
        os.rename(folder, closed)
    except FileNotFoundError:  # a later session has already done it
        return
    for name in os.listdir(closed):
        if PART_NAME.fullmatch(name):
            _discard(closed / name)


def _discard(part: Path) -> None:
    """Remove a file or folder in a session's folder."""
    try:
        part.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(part)
