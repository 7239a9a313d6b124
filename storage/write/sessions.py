"""Writing sessions: publish files atomically, and only while no later session has begun.

Everything a writer publishes is first written into its session's own folder and reaches its path by one system call
that names the file there: a rename for data, an exclusive link for records. Opening a run for writing renames the
folders of all earlier sessions away. From then on the calls of an earlier writer, however late it wakes up, name a file
that does not exist, and fail.

Which session is the later one is decided by its number. A session claims it by creating a file that must not exist,
then makes its folder, and only then looks who else is there. Of two sessions at least one so sees the other: the later
one sees the folder of the earlier one and closes it, or the earlier one sees the claim of the later one and gives up.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, FencedOut
from metaloom.storage.format.canonical import render, sealed
from metaloom.storage.format.files import Content, make_folder, sync_folder
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
from metaloom.storage.write.files import FileCreator
from metaloom.storage.write.holder import WriterLock, acquire_lock

_MOST_ATTEMPTS = 100


@dataclass
class Session:
    """The right to write one run, from one opening to its close or to the next opening elsewhere.

    Every method that writes raises FencedOut once a later session has begun.

    Attributes:
        root: Folder of the run.
        number: Number of the session among the run's.
        token: Permanent identifier of the session.
        remote: Remote half of the session, if the folder caches a run under object storage.
    """

    root: Path
    number: int
    token: str
    lock: WriterLock
    remote: RemoteSession | None = None
    _changed: dict[Path, Path | None] = field(default_factory=dict[Path, Path | None], init=False)
    _parts: int = field(default=0, init=False)
    _facts: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    _creator: FileCreator = field(default_factory=FileCreator, init=False)

    @property
    def folder(self) -> Path:
        """Folder of the session's unpublished files."""
        return self.root / FOLDER / str(SessionName(self.number, self.token))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Record who the session is, and add facts to those recorded before."""
        self._facts = {"started": utc(), **self._facts, **facts}
        about = {"schema": "metaloom/1", "token": self.token, "versions": versions(), **self._facts}
        self.replace(self.write_aside([(render(sealed(about)),)]), [self.folder / ABOUT])

    def seal(self, head: Head | None) -> None:
        """Write down the newest record of all, so that it cannot go unnoticed; nothing more may be published."""
        self.describe({"sealed": True, **({"head": head.document()} if head else {})})
        self.share()

    def write_aside(self, contents: Iterable[Content]) -> list[Path]:
        """Write files into the session's folder, safe from a power cut.

        All are written before the first is waited for, so the disk can work on them together.
        """
        paths: list[Path] = []
        descriptors: list[int] = []
        try:
            for content in contents:
                paths.append(self._next_part())
                descriptors.append(self._creator.create(paths[-1], content))
            for descriptor in descriptors:
                os.fsync(descriptor)
        except FileNotFoundError as error:
            raise self.explain(error) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return paths

    def replace(self, parts: Sequence[Path], targets: Sequence[Path]) -> None:
        """Move written files to their targets, replacing files that an interrupted session left there."""
        try:
            for part, target in zip(parts, targets, strict=True):
                os.replace(part, target)
            for folder in {target.parent for target in targets}:  # which may be the session's own
                sync_folder(folder)
        except FileNotFoundError as error:
            raise self.explain(error) from error
        self._note(targets)

    def publish(self, content: bytes, target: Path) -> None:
        """Make a file appear, complete and safe from a power cut, where there was none.

        Raises:
            FileExistsError: something is there already.
        """
        (part,) = self.write_aside([(content,)])
        try:
            os.link(part, target)
        except FileNotFoundError as error:
            raise self.explain(error) from error
        sync_folder(target.parent)
        part.unlink(missing_ok=True)
        self._note([target])

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files. Missing ones are skipped.

        A removed file may return after a power cut until its folder or the session's (as by `describe`) is synced.
        """
        for path in paths:
            part = self._next_part()
            self._note([path])
            try:
                # Through the session's folder, so that nobody who lost the run takes away what a later writer put back.
                os.rename(path, part)
            except FileNotFoundError as error:
                if not self.folder.is_dir():
                    raise self.explain(error) from error
                continue
            _discard(part)

    def write_folder(self, contents: Iterable[tuple[str, Content]]) -> Path:
        """Write a folder of files into the session's folder, one after the other, safe from a power cut."""
        part = self._next_part()
        folders = [part]
        try:
            part.mkdir()
            for name, content in contents:
                path = part / name
                parents = [folder for folder in path.parents if folder.is_relative_to(part)]
                for folder in (folder for folder in reversed(parents) if folder not in folders):
                    folder.mkdir()
                    folders.append(folder)
                descriptor = self._creator.create(path, content)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            for folder in reversed(folders):
                sync_folder(folder)
        except FileNotFoundError as error:
            raise self.explain(error) from error
        return part

    def place_folder(self, part: Path, target: Path) -> None:
        """Move a written folder to its target, which must not exist."""
        try:
            os.rename(part, target)
        except FileNotFoundError as error:
            raise self.explain(error) from error
        sync_folder(target.parent)
        if self.remote is not None:
            self._note(path for path in target.rglob("*") if path.is_file())

    def link(self, paths: Mapping[Path, Path]) -> None:
        """Give files a second name each, through the session's folder. Missing files are skipped."""
        for path, target in paths.items():
            part = self._next_part()
            try:
                os.link(path, part)
                os.replace(part, target)
            except FileNotFoundError as error:
                if not self.folder.is_dir():
                    raise self.explain(error) from error
            # POSIX: replacing a name by another one of the same file does nothing, and leaves both.
            part.unlink(missing_ok=True)
            if self.remote is not None:  # the object is there, whether or not its copy is
                self._changed[target] = path
        for folder in {target.parent for target in paths.values()}:
            sync_folder(folder)

    def follow(self, log: RemoteLog) -> None:
        """Update the cache from the log, through the session: one that lost the run changes nothing."""
        self.remove(log.surplus())
        missing = log.missing_texts()
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.remove(path for path in missing if path.is_dir())
        self.replace(self.write_aside((raw,) for raw in missing.values()), [*missing])
        self._changed.clear()  # the log knows it

    def share(self) -> None:
        """Send what was published and removed since the last time to the object store, if the run is under one.

        Raises:
            StorageFailed: it cannot be reached.
        """
        if self.remote is not None:
            self.remote.commit(self._changed)
        self._changed.clear()

    def share_all(self) -> None:
        """Send all in which the object store differs."""
        if self.remote is not None:
            self.remote.commit_all()
        self._changed.clear()

    def close(self) -> None:
        """End the session and let the next writer in."""
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

    def explain(self, error: OSError) -> Exception:
        """Explain a missing file: a FencedOut error if a later session has begun, else the error itself."""
        return error if self.folder.is_dir() else _fenced_out(self.root, self.number)


def begin_session(root: Path, *, take_over: bool) -> Session:
    """End every earlier session of a run and begin a new one.

    Raises:
        RunLocked: another process writes the run.
        FencedOut: another one took the run over while this one was about to begin.
        StorageFailed: it is under an object store that cannot be written.
    """
    token = secrets.token_hex(8)
    lock = acquire_lock(root / "writer.lock", token, take_over=take_over)
    remote: RemoteSession | None = None
    try:
        log = RemoteLog.of(root)
        if log is not None:
            remote = RemoteSession.begin(log, token, take_over=take_over)
        session = Session(root, _begin(root, token, lock), token, lock, remote)
        if log is not None:
            session.follow(log)
    except BaseException:
        try:
            if remote is not None:
                remote.end()
        finally:
            lock.release()
        raise
    return session


def _begin(root: Path, token: str, lock: WriterLock) -> int:
    """Make the folder of a session that is later than all others, and close theirs; returns its number."""
    make_folder(root / FOLDER)
    number = -1
    for _ in range(_MOST_ATTEMPTS):
        number = _claim(root / FOLDER)
        own = root / FOLDER / str(SessionName(number, token))
        make_folder(own)
        # Only sessions that exist by now may be closed: one that begins after this look is later than this session.
        names = os.listdir(root / FOLDER)
        latest = max(map(session_number, names))
        if latest == number and lock.is_held():
            for name in names:
                if (other := SessionName.parse(name)) and other.token != token and not other.closed:
                    _close_folder(root / FOLDER / name)
            return number
        _close_folder(own)
        # Whoever holds the lock tries again: the later session may be one that was about to begin and gives up now.
        if not lock.is_held():
            break
    raise _fenced_out(root, number)


def _claim(sessions: Path) -> int:
    """Take a number that no session has, nor ever will have again."""
    names = os.listdir(sessions)
    for name, previous in stray_sessions(sessions, names):
        raise _too_far(sessions / name, f"session {session_number(name)}, while the last one before it is {previous}")
    number = max(map(session_number, names), default=-1) + 1
    if number >= MOST_SESSIONS:
        raise _too_far(sessions, f"session {number - 1}")
    while True:
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            os.close(os.open(sessions / f"{number:06d}.claim", flags, 0o666))
        except FileExistsError:
            number += 1
        else:
            return number


def _too_far(where: Path, found: str) -> DamagedRun:
    return DamagedRun(
        where,
        found=f"names {found}",
        required=f"a number below {MOST_SESSIONS} that continues the sequence of earlier sessions",
        action="Nothing of the run is in it if `metaloom verify` says that it does not belong to the run: remove it",
    )


def _fenced_out(root: Path, number: int) -> FencedOut:
    return FencedOut(
        root,
        found=f"session {number} of this process was ended by a later writer",
        required="the newest session of the run",
        action="Stop this process; the later writer continues from what was published",
    )


def _close_folder(folder: Path) -> None:
    closed = folder.with_name(folder.name + CLOSED)
    try:
        os.rename(folder, closed)
    except FileNotFoundError:  # a later session has done it
        return
    for name in os.listdir(closed):
        if PART_NAME.fullmatch(name):
            _discard(closed / name)


def _discard(part: Path) -> None:
    """Remove a part, which is a folder if one stood at the path of a file."""
    try:
        part.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(part)
