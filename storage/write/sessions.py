"""Writing sessions: publish files atomically, and only while no later session has begun.

Everything a writer publishes is first written into its session's own folder and reaches its place by one system call
that names the file there: a rename for data, an exclusive link for records. Opening a run for writing renames the
folders of all earlier sessions away. From then on the calls of an earlier writer, however late it wakes up, name a file
that does not exist, and fail.
"""

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.storage.errors import FencedOut
from metaloom.storage.format.canonical import Document, read_sealed, render, sealed
from metaloom.storage.format.files import Content, make_folder, sync_folder
from metaloom.storage.format.provenance import utc, versions
from metaloom.storage.remote.log import RemoteLog
from metaloom.storage.remote.session import RemoteSession
from metaloom.storage.write.direct import FileCreator
from metaloom.storage.write.locks import WriterLock, acquire_lock

SESSION_NAME = re.compile(r"(\d{6})-([0-9a-f]{16})(\.closed)?")
PART_NAME = re.compile(r"\d{8}\.part")
_CLOSED = ".closed"
_ABOUT = "session.json"


@dataclass
class Session:
    """The right to write one run, from one opening to its close or to the next opening elsewhere.

    Attributes:
        root: the run's folder.
        number: counts the openings of the run.
        token: identifies the session for ever.
        remote: the session's other half, if the folder caches a run under object storage.
    """

    root: Path
    number: int
    token: str
    lock: WriterLock
    remote: RemoteSession | None = None
    _changed: dict[Path, None] = field(default_factory=dict[Path, None], init=False)
    _parts: int = field(default=0, init=False)
    _facts: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    _creator: FileCreator = field(default_factory=FileCreator, init=False)

    @property
    def folder(self) -> Path:
        """Folder of what the session has not published yet."""
        return self.root / "_sessions" / f"{self.number:06d}-{self.token}"

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write down who the session is, and facts about it beside those that it wrote down before."""
        self._facts = {"started": utc(), **self._facts, **facts}
        about = {"schema": "metaloom/1", "token": self.token, "versions": versions(), **self._facts}
        self.replace(self.write_aside([(render(sealed(about)),)]), [self.folder / _ABOUT])

    def write_aside(self, contents: Iterable[Content]) -> list[Path]:
        """Write files into the session's folder, safe from a power cut.

        All are written before the first is waited for, so the disk can work on them together.

        Raises:
            FencedOut: a later session has begun.
        """
        paths: list[Path] = []
        descriptors: list[int] = []
        try:
            for content in contents:
                paths.append(self._next_part())
                descriptors.append(self._create(paths[-1], content))
            for descriptor in descriptors:
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return paths

    def replace(self, parts: Sequence[Path], targets: Sequence[Path]) -> None:
        """Move written files to their places, over what an interrupted session may have left there.

        Raises:
            FencedOut: a later session has begun.
        """
        for part, target in zip(parts, targets, strict=True):
            try:
                os.replace(part, target)
            except FileNotFoundError as error:
                raise self._explain(error) from error
        for folder in {target.parent for target in targets}:
            sync_folder(folder)
        self._note(targets)

    def publish(self, content: bytes, target: Path) -> None:
        """Make a file appear, complete and safe from a power cut, where there was none.

        Raises:
            FencedOut: a later session has begun.
            FileExistsError: something is there already.
        """
        (part,) = self.write_aside([(content,)])
        try:
            os.link(part, target)
        except FileNotFoundError as error:
            raise self._explain(error) from error
        sync_folder(target.parent)
        part.unlink(missing_ok=True)
        self._note([target])

    def remove(self, paths: Iterable[Path]) -> None:
        """Take files away, those that are there; what went is not yet safe from coming back after a power cut.

        Raises:
            FencedOut: a later session has begun.
        """
        for path in paths:
            part = self._next_part()
            self._note([path])
            try:
                # Through the session's folder, so that nobody who lost the run takes away what a later writer put back.
                os.rename(path, part)
            except FileNotFoundError as error:
                if not self.folder.is_dir():
                    raise self._explain(error) from error
                continue
            part.unlink(missing_ok=True)

    def share(self) -> None:
        """Send what was published and removed since the last time to the object store, if the run is under one.

        Raises:
            FencedOut: a later session has begun there.
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

    def _create(self, path: Path, content: Content) -> int:
        try:
            return self._creator.create(path, content)
        except FileNotFoundError as error:
            raise self._explain(error) from error

    def _explain(self, error: OSError) -> Exception:
        if self.folder.is_dir():
            return error
        return FencedOut(
            self.root,
            found=f"session {self.number} of this process was ended by a later writer",
            required="the newest session of the run",
            action="Stop this process; the later writer goes on with what was published",
        )


def begin_session(root: Path, *, take_over: bool) -> Session:
    """End every earlier session of a run and begin a new one.

    Raises:
        RunLocked: another process writes the run.
        StorageFailed: it is under an object store that cannot be written.
    """
    token = secrets.token_hex(8)
    lock = acquire_lock(root / "writer.lock", token, take_over=take_over)
    remote: RemoteSession | None = None
    try:
        log = RemoteLog.of(root)
        if log is not None:
            remote = RemoteSession.begin(log, token, take_over=take_over)
            log.mirror()
        sessions = root / "_sessions"
        make_folder(sessions)
        numbers = [number for name in os.listdir(sessions) if (number := _end_earlier(sessions / name)) is not None]
        session = Session(root, max(numbers, default=-1) + 1, token, lock, remote)
        make_folder(session.folder)
    except BaseException:
        try:
            if remote is not None:
                remote.end()
        finally:
            lock.release()
        raise
    return session


def read_session(folder: Path) -> Document:
    """Read what a session wrote down about itself.

    Raises:
        FileNotFoundError: it was interrupted before it could.
        DamagedRun: the file is not what was written.
    """
    try:
        return read_sealed(folder / _ABOUT)
    except FileNotFoundError:  # it may have been closed since its folder was seen
        return read_sealed(folder.with_name(folder.name.removesuffix(_CLOSED) + _CLOSED) / _ABOUT)


def _end_earlier(folder: Path) -> int | None:
    match = SESSION_NAME.fullmatch(folder.name)
    if match is None:
        return None
    if match[3] is None:
        _close_folder(folder)
    return int(match[1])


def _close_folder(folder: Path) -> None:
    closed = folder.with_name(folder.name + _CLOSED)
    try:
        os.rename(folder, closed)
    except FileNotFoundError:  # a later session has done it
        return
    for name in os.listdir(closed):
        if PART_NAME.fullmatch(name):
            (closed / name).unlink()
