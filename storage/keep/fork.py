"""Forks: runs that begin with another run's iterations and share its files."""

import errno
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, RunExists, damaged
from metaloom.storage.format.files import make_folder, make_folders, sync_file, sync_folder
from metaloom.storage.format.places import check_path, folder_of, url_of
from metaloom.storage.format.records import StageRecord, has_shards
from metaloom.storage.format.segments import FOLDER as SEGMENTS
from metaloom.storage.format.segments import Link, join, segment_name
from metaloom.storage.format.sessions import Head, read_session, sessions_in
from metaloom.storage.format.settings import changed
from metaloom.storage.format.thinning import FOLDER as THINNED
from metaloom.storage.format.thinning import marker_path, packed_marker_path, render_packed_marker
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.history import missing_positions, sealed_links
from metaloom.storage.read.info import as_ancestor
from metaloom.storage.read.segments import Segment, chunk_row
from metaloom.storage.remote.log import RemoteLog, follow, log_folder
from metaloom.storage.remote.session import RemoteSession
from metaloom.storage.run import Run
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.creation import check_free, creating, new_info, publish_info, write_skeleton
from metaloom.storage.write.holder import acquire_lock
from metaloom.storage.write.packer import write_segment
from metaloom.storage.write.sessions import Session, begin_session

_CANNOT_SHARE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Fork:
    """Summary of a fork. Files that could not be shared with the parent were copied."""

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
    progress: Progress = unseen,
) -> Fork:
    """Create a run that shares the iterations before `iteration` of another run and continues with a new configuration.

    Files are shared by hard links, so they survive thinning or deletion of the parent. Outputs thinned in the parent
    are thinned in the fork. The parent may still be written. Other arguments and errors are as in `create_run`.

    Raises:
        StageMissing: the parent has fewer complete iterations.
    """
    path = check_path(folder_of(path))
    if iteration:
        parent.select(iteration - 1)
    parent.record(parent.learner_ref(iteration))
    if capacity < iteration:
        raise ValueError(f"capacity is {capacity}; the fork begins with {iteration} iterations")
    with creating(path):
        while True:
            known = parent.files.segments.names()
            try:
                with _workshop(path) as folder:
                    follow(path)
                    check_free(path)
                    links = _Links(parent.path, folder)
                    shared = _SharedOutputs.of(parent, iteration)
                    about = (config, config_digest, environment)
                    _build(parent, shared, links, iteration, capacity, about, progress)
                    _place(folder, path)
                    break
            except (FileNotFoundError, DamagedRun):
                if parent.files.segments.names() == known:
                    raise
                # Packed in the meantime: the files to link have moved.
                parent.files.segments.all(refresh=True)
    return Fork(path, iteration, *links.shared, *links.copied)


@dataclass(frozen=True)
class _SharedOutputs:
    """Outputs of the parent that a fork shares.

    `records` are in no segment, or in the segment `cut`, which is only partly shared. `chain` contains all links, in
    order.
    """

    records: list[StageRecord]
    segments: list[Segment]
    cut: Segment | None
    chain: Sequence[Link]

    @classmethod
    def of(cls, parent: Run, iteration: int) -> "_SharedOutputs":
        start = parent.learner_ref(0)
        refs = [ref for ref in parent.files.live_refs() if ref.iteration < iteration or ref == start]
        segments = parent.files.segments.all(refresh=True)
        whole = [segment for segment in segments if segment.iterations.stop <= iteration]
        refs = [ref for ref in refs if not parent.files.segments.holding(ref)]
        partly = (s for s in segments if s not in whole and (s.iterations.start < iteration or s.seal.holds(start)))
        cut = next(partly, None)
        if cut is not None:
            refs += [ref for ref in cut.seal.refs() if ref.iteration < iteration or ref == start]
        records = sorted((parent.record(ref) for ref in refs), key=lambda record: record.sequence)
        return cls(records, whole, cut, join(sealed_links(whole, records)))

    @property
    def newest(self) -> Head:
        return self.chain[-1].head


def _build(
    parent: Run,
    shared: _SharedOutputs,
    links: "_Links",
    iteration: int,
    capacity: int,
    about: tuple[Mapping[str, Any], str, Mapping[str, Any]],
    progress: Progress,
) -> None:
    folder, config = links.target, about[0]
    _share_sessions(parent.path, links)
    session = begin_session(folder, take_over=False)
    try:
        write_skeleton(folder, session, capacity)
        _share_outputs(parent, shared, links, session, iteration, progress)
        links.sync()
        origin = {**_origin(parent, iteration, shared.newest, config), "first_session": session.number}
        publish_info(folder, session, new_info(*about, parent.stages, **origin))
        lost = missing_positions(parent.path, shared.chain, shared.newest.sequence)
        session.describe({"lost": lost, "next_sequence": shared.newest.sequence + 1})
        session.seal(shared.newest)
    finally:
        session.close()


@contextmanager
def _workshop(path: Path) -> Generator[Path]:
    """Yield a free path in a hidden folder next to the new run; the folder is removed after the block."""
    make_folders(path.parent)
    # Named after the run, so that the next attempt removes what a killed attempt left.
    outer = path.parent / f".metaloom-fork-{path.name}"
    outer.mkdir(exist_ok=True)
    lock = acquire_lock(outer / "writer.lock", secrets.token_hex(8), take_over=False)
    try:
        folder = outer / "run"
        shutil.rmtree(folder, ignore_errors=True)
        yield folder
    finally:
        shutil.rmtree(outer / "run", ignore_errors=True)
        lock.path.unlink()  # a workshop cannot be taken over
        lock.release()
        outer.rmdir()


def _origin(parent: Run, iteration: int, newest: Head, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parent": {
            "id": parent.info["id"],
            "name": parent.name,
            "iteration": iteration,
            "learner": parent.record(parent.learner_ref(iteration)).digest,
            "newest_record": newest.sha256,
            "changes": {name: [*values] for name, values in changed(parent.config, config).items()},
        },
        "ancestors": [*parent.info.get("ancestors", []), as_ancestor(parent.info)],
        "first_sequence": newest.sequence + 1,
        # Arrays keep the parent's format.
        "format": parent.info["format"],
    }


def _share_sessions(root: Path, links: "_Links") -> None:
    for session in sessions_in(root):
        try:
            read_session(root / "_sessions" / str(session))
        except (FileNotFoundError, DamagedRun):  # interrupted before writing anything, or reported by `verify`
            continue
        name = f"{session._replace(closed=True)}/session.json"
        try:
            links.share(f"_sessions/{session}/session.json", f"_sessions/{name}")
        except FileNotFoundError:  # it was closed in the meantime
            links.share(f"_sessions/{name}", f"_sessions/{name}")


def _share_outputs(
    parent: Run, shared: _SharedOutputs, links: "_Links", session: Session, iteration: int, progress: Progress
) -> None:
    live = [record for record in shared.records if not parent.files.segments.holding(record.ref)]
    own = {r.ref.iteration for r in live if r.ref != parent.learner_ref(0)}
    held = [*shared.segments, *([shared.cut] if shared.cut else [])]
    packed = {i for segment in held for i in segment.iterations if i < iteration}
    _share_markers(parent, own | packed, links)
    arrays = {chunk.array for record in shared.records for chunk in record.chunks}
    arrays.update(*(segment.seal.arrays for segment in shared.segments))
    store = ArrayStore(CommittedFiles(session.root, parent.stages), session, shards=has_shards(parent.info))
    store.adopt([parent.files.spec(path) for path in sorted(arrays)])
    sizes = [sum(1 for _ in segment.seal.refs()) for segment in shared.segments]
    total = sum(sizes) + len(shared.records)
    for n, segment in enumerate(shared.segments):
        progress(sum(sizes[:n]), total)
        _share_segment(parent, segment, links)
    if shared.cut is not None:
        _cut_segment(parent, shared.cut, [r for r in shared.records if r not in live], links, session, iteration)
    thinned = CommittedFiles(links.target, parent.stages)
    for n, record in enumerate(live):
        progress(total - len(live) + n, total)
        links.share(f"_commits/{record.ref.file_name}")
        gone = thinned.is_thinned(record)
        # The tables of an iteration belong to the record of its update.
        for file in (*(chunk for chunk in record.chunks if chunk.size and not gone), *record.tables):
            if not (parent.path / file.path).exists():
                parent.files.bring(file.path)
            try:
                links.share(file.path)
            except FileNotFoundError:
                if not parent.files.is_thinned(record):
                    raise damaged(parent.path / file.path, "is missing") from None
                _share_markers(parent, {record.ref.iteration}, links)  # thinned in the meantime


def _share_segment(parent: Run, segment: Segment, links: "_Links") -> None:
    parent.files.bring_all(_logged(parent, segment.folder))
    for folder, _, names in os.walk(segment.folder):
        for name in names:
            links.share((Path(folder) / name).relative_to(parent.path).as_posix())
    with suppress(FileNotFoundError):
        links.share(packed_marker_path(Path(), segment.iterations).as_posix())
    _share_restored(parent, segment, links)


def _share_restored(parent: Run, segment: Segment, links: "_Links") -> None:
    """Share outputs that were thinned and then restored after packing."""
    for array in segment.seal.arrays:
        folder = parent.files.data / array
        logged = (path.rpartition("/")[2] for path in _logged(parent, folder))
        rows = {name: chunk_row(name) for name in {*os.listdir(folder), *logged}}
        held = (name for name, row in rows.items() if row is not None and segment.holds_row(array, row))
        restored = [f"data.zarr/{array}/{name}" for name in held]
        parent.files.bring_all(restored)
        for path in restored:
            links.share(path)


def _logged(parent: Run, folder: Path) -> list[str]:
    """Return the paths of a folder's files in object storage, if the parent is stored there."""
    remote, prefix = parent.files.remote, folder.relative_to(parent.path).as_posix()
    return [path for path in remote.files if path.startswith(f"{prefix}/")] if remote is not None else []


def _cut_segment(
    parent: Run, segment: Segment, records: list[StageRecord], links: "_Links", session: Session, iteration: int
) -> None:
    """Write the fork's part of a segment; files outside of shards are shared."""
    iterations = range(segment.iterations.start, max(iteration, segment.iterations.start + 1))
    part = write_segment(parent.files, session, iterations, records)
    make_folder(links.target / SEGMENTS)
    target = links.target / SEGMENTS / segment_name(iterations)
    session.place_folder(part, target)
    markers = {i: outputs for i, outputs in parent.files.packed_markers(segment).items() if i < iteration}
    if markers:
        make_folder(links.target / THINNED)
        raw = render_packed_marker(iterations, markers)
        session.replace(session.write_aside([(raw,)]), [packed_marker_path(links.target, iterations)])
    new = Segment(target)
    _share_restored(parent, new, links)
    rows: dict[str, str] = {}
    for record in records:
        for chunk in record.chunks:
            if chunk.size and not new.seal.arrays[chunk.array].sharded and not parent.files.is_thinned(record):
                spec, row = parent.files.spec(chunk.array), parent.files.row(record.ref, chunk.array)
                paths = (segment.chunk_path(spec, row), new.chunk_path(spec, row))
                rows[paths[0].relative_to(parent.path).as_posix()] = paths[1].relative_to(links.target).as_posix()
    parent.files.bring_all(rows)
    for path, new_path in rows.items():
        with suppress(FileNotFoundError):  # it was restored elsewhere
            links.share(path, new_path)


def _share_markers(parent: Run, iterations: Iterable[int], links: "_Links") -> None:
    for iteration in {*iterations}.intersection(parent.files.live_markers()):
        links.share(marker_path(Path(), iteration).as_posix())


class _Links:
    """Sharing of one run's files with another, as hard links if possible and as copies otherwise."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self.target = target
        self._folders: set[Path] = set()
        self.shared = (0, 0)
        self.copied = (0, 0)

    def share(self, name: str, new_name: str | None = None) -> None:
        source, target = self._source / name, self.target / (new_name or name)
        if target.parent not in self._folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._folders |= {folder for folder in target.parents if folder.is_relative_to(self.target)}
        target.unlink(missing_ok=True)
        size = source.stat(follow_symlinks=False).st_size
        try:
            os.link(source, target, follow_symlinks=False)
            self.shared = (self.shared[0] + 1, self.shared[1] + size)
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
            with open(source, "rb") as old, open(target, "xb") as new:
                shutil.copyfileobj(old, new, 2**20)
                sync_file(new)
            self.copied = (self.copied[0] + 1, self.copied[1] + size)

    def sync(self) -> None:
        for folder in sorted(self._folders, reverse=True):
            sync_folder(folder)


def _place(folder: Path, path: Path) -> None:
    """Upload a new run if its path has a URL, then move it to its path."""
    url = url_of(path)
    if url is not None:
        log = RemoteLog(folder, url, log_folder(path))
        session = RemoteSession.begin(log, secrets.token_hex(8), take_over=False)
        session.commit_all()
        session.end()
    try:
        os.rename(folder, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RunExists(
            path,
            found="the path was created in the meantime",
            required="a path where nothing is stored yet",
            action="Choose another path",
        ) from None
    sync_folder(path.parent)
