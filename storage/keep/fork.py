"""Make a run that begins with the iterations of another one, sharing its files."""

import errno
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, RunExists, damaged
from metaloom.storage.format.files import sync_folder
from metaloom.storage.format.paths import check_path
from metaloom.storage.format.records import StageRecord, StoredFile
from metaloom.storage.format.refs import StageRef
from metaloom.storage.format.sessions import SESSION_NAME, Head, read_session
from metaloom.storage.format.settings import changed
from metaloom.storage.keep.thinning import marker_path
from metaloom.storage.read.ancestry import as_ancestor
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.remote.log import RemoteLog, follow, log_folder
from metaloom.storage.remote.places import folder_of, url_of
from metaloom.storage.remote.session import RemoteSession
from metaloom.storage.run import Run
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.creation import check_free, creating, new_info, publish_info, write_skeleton
from metaloom.storage.write.locks import acquire_lock
from metaloom.storage.write.sessions import Session, begin_session

_CANNOT_SHARE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Fork:
    """Account of what a fork consists of.

    Attributes:
        path: its folder.
        iteration: the first iteration that is its own.
        shared_files, shared_bytes: what it shares with its parent.
        copied_files, copied_bytes: what was copied, because the file system cannot share it.
    """

    path: Path
    iteration: int
    shared_files: int
    shared_bytes: int
    copied_files: int
    copied_bytes: int


def fork_run(
    parent: Run,
    iteration: int,
    path: str | Path,
    *,
    config: Mapping[str, Any],
    config_digest: str,
    capacity: int,
    environment: Mapping[str, Any],
) -> Fork:
    """Create a run that has the iterations before `iteration` of another one and goes on under its own configuration.

    Files are shared by hard links: they stay whole when the parent is thinned or deleted. What the parent has thinned
    is thinned in the fork.

    Args:
        parent: the run to begin with; a writer may go on with it meanwhile.
        iteration: the first iteration that is not taken over.
        path: folder or URL of the new run; must not exist, or be empty.
        config: the new run's settings, as plain JSON data.
        config_digest: digest of those that decide the numbers.
        capacity: iterations to make room for.
        environment: what else decides the numbers or helps to find it again, as plain JSON data.

    Raises:
        InvalidRunName: the path cannot be told on one line.
        StageMissing: the parent has not so many complete iterations.
        RunExists: there is something at the path.
        RunLocked: another process is creating the same run.
        StorageFailed: the system does not let us write there.
    """
    path = check_path(folder_of(path))
    _require(parent, iteration)
    if capacity < iteration:
        raise ValueError(f"capacity is {capacity}; the fork begins with {iteration} iterations")
    with creating(path), _workshop(path) as folder:
        follow(path)
        check_free(path)
        records = _shared_records(parent, iteration)
        links = _Links(parent.path, folder)
        _share_sessions(parent.path, links)
        session = begin_session(folder, take_over=False)
        try:
            write_skeleton(folder, session, capacity)
            _share_outputs(parent, records, links, session, capacity)
            links.sync()
            origin = {**_origin(parent, iteration, records, config), "first_session": session.number}
            publish_info(folder, session, new_info(config, config_digest, environment, parent.stages, **origin))
            session.describe({"lost": _gaps(records), "next_sequence": records[-1].sequence + 1})
            session.seal(Head.of(records[-1]))
        finally:
            session.close()
        _upload(folder, path)
        _move(folder, path)
    return Fork(path, iteration, *links.shared, *links.copied)


@contextmanager
def _workshop(path: Path) -> Generator[Path]:
    """A folder beside the new run's, in which it is made out of sight; empty, and gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named after the run, so that what a kill leaves is found and cleared by whoever tries again.
    outer = path.parent / f".metaloom-fork-{path.name}"
    outer.mkdir(exist_ok=True)
    lock = acquire_lock(outer / "writer.lock", secrets.token_hex(8), take_over=False)
    try:
        folder = outer / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(outer / "run", ignore_errors=True)
        lock.path.unlink()  # nobody takes a workshop over
        lock.release()
        outer.rmdir()


def _require(parent: Run, iteration: int) -> None:
    if iteration:
        parent.select(iteration - 1)
    parent.record(parent.learner_ref(iteration))


def _shared_records(parent: Run, iteration: int) -> list[StageRecord]:
    start = parent.learner_ref(0)
    refs = [ref for ref in parent.refs() if ref.iteration < iteration or ref == start]
    return sorted((parent.record(ref) for ref in refs), key=lambda record: record.sequence)


def _gaps(records: Iterable[StageRecord]) -> list[int]:
    present = {record.sequence for record in records}
    return [sequence for sequence in range(max(present)) if sequence not in present]


def _origin(parent: Run, iteration: int, records: list[StageRecord], config: Mapping[str, Any]) -> dict[str, Any]:
    """Origin of the fork, as its run.json tells it."""
    return {
        "parent": {
            "id": parent.info["id"],
            "name": parent.name,
            "iteration": iteration,
            "learner": parent.record(parent.learner_ref(iteration)).digest,
            "newest_record": records[-1].sha256,
            "changes": {name: [*values] for name, values in changed(parent.config, config).items()},
        },
        "ancestors": [*parent.info.get("ancestors", []), as_ancestor(parent.info)],
        "first_sequence": records[-1].sequence + 1,
    }


def _share_sessions(root: Path, links: "_Links") -> None:
    """Sessions that wrote the shared records."""
    for folder in sorted((root / "_sessions").iterdir()):
        match = SESSION_NAME.fullmatch(folder.name)
        if match is None:
            continue
        try:
            read_session(folder)
        except (FileNotFoundError, DamagedRun):  # interrupted before it wrote anything, or for `verify` to tell
            continue
        name = f"{match[1]}-{match[2]}.closed/session.json"
        try:
            links.share(f"_sessions/{folder.name}/session.json", f"_sessions/{name}")
        except FileNotFoundError:  # it was closed meanwhile
            links.share(f"_sessions/{name}", f"_sessions/{name}")


def _share_outputs(parent: Run, records: list[StageRecord], links: "_Links", session: Session, capacity: int) -> None:
    thinned = _share_markers(
        parent, {record.ref.iteration for record in records if record.ref != parent.learner_ref(0)}, links
    )
    arrays = {chunk.array for record in records for chunk in record.chunks}
    ArrayStore(CommittedFiles(session.root, parent.stages), session).adopt(
        [parent.files.spec(path) for path in sorted(arrays)]
    )
    for record in records:
        links.share(f"_commits/{record.ref.file_name}")
        for file in _files_of(record, with_arrays=thinned.get(record.ref) != record.sha256):
            if not (parent.path / file.path).exists():
                parent.files.bring(file.path)
            try:
                links.share(file.path)
            except FileNotFoundError:
                if not parent.files.is_thinned(record):
                    raise damaged(parent.path / file.path, "is missing") from None
                thinned |= _share_markers(parent, {record.ref.iteration}, links)  # thinned since we looked


def _share_markers(parent: Run, iterations: Iterable[int], links: "_Links") -> dict[StageRef, str]:
    thinned: dict[StageRef, str] = {}
    for iteration in sorted({*iterations}.intersection(parent.files.thinned_iterations())):
        links.share(marker_path(Path(), iteration).as_posix())
        thinned |= CommittedFiles(links.target, parent.stages).thinned(iteration)
    return thinned


def _files_of(record: StageRecord, *, with_arrays: bool) -> Iterator[StoredFile]:
    yield from (chunk for chunk in record.chunks if with_arrays and chunk.size)
    # The tables of an iteration belong to the record of its update.
    yield from record.tables


class _Links:
    """Makes files of one run appear in another: linked where that is possible, copied where not."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self.target = target
        self._folders: set[Path] = set()
        self.shared = (0, 0)
        self.copied = (0, 0)

    def share(self, name: str, new_name: str | None = None) -> None:
        """Make a file appear; replaces what is there."""
        source, target = self._source / name, self.target / (new_name or name)
        self._make_folder(target.parent)
        target.unlink(missing_ok=True)
        size = source.stat(follow_symlinks=False).st_size
        try:
            os.link(source, target, follow_symlinks=False)
            self.shared = (self.shared[0] + 1, self.shared[1] + size)
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
            _copy(source, target)
            self.copied = (self.copied[0] + 1, self.copied[1] + size)

    def sync(self) -> None:
        """Make the new names survive a power cut."""
        for folder in sorted(self._folders, reverse=True):
            sync_folder(folder)

    def _make_folder(self, folder: Path) -> None:
        if folder not in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            self._folders |= {folder, *(f for f in folder.parents if f.is_relative_to(self.target))}


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as old, open(target, "xb") as new:
        shutil.copyfileobj(old, new, 2**20)
        new.flush()
        os.fsync(new.fileno())


def _upload(folder: Path, path: Path) -> None:
    """Store a new run under the URL that its path stands for, if it does."""
    url = url_of(path)
    if url is not None:
        log = RemoteLog(folder, url, log_folder(path))
        session = RemoteSession.begin(log, secrets.token_hex(8), take_over=False)
        session.commit_all()
        session.end()


def _move(folder: Path, path: Path) -> None:
    try:
        os.rename(folder, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RunExists(
            path,
            found="something appeared there meanwhile",
            required="a path where nothing is stored yet",
            action="Choose another",
        ) from None
    sync_folder(path.parent)
