"""Forks: runs that begin with another run's iterations and share its files."""

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, IncompatibleFormat, RunExists, damaged
from metaloom.storage.format.files import make_folder, make_folders, sync_file, sync_folder
from metaloom.storage.format.places import check_path, folder_of, url_of
from metaloom.storage.format.records import FORMATS, StageRecord, has_shards
from metaloom.storage.format.segments import FOLDER as SEGMENTS
from metaloom.storage.format.segments import join, segment_name
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
    new_metrics: bool = False,
    progress: Progress = unseen,
) -> Fork:
    """Create a run that shares another run's iterations before `iteration` and continues with a new configuration.

    Files are shared by hard links, so they survive thinning or deletion of the parent. Outputs thinned in the parent
    are thinned in the fork. The parent may still be written. With `new_metrics`, the fork's own iterations may have
    other metrics than the parent's. Other arguments and errors are as in `create_run`.

    Raises:
        StageMissing: the parent has fewer complete iterations.
        IncompatibleFormat: the parent's format does not allow new metrics.
    """
    path = check_path(folder_of(path))
    if new_metrics and not has_shards(parent.info):
        raise IncompatibleFormat(
            parent.location,
            found=f"settings that change the metrics of a run of format {parent.info['format']}",
            required="the metrics of the parent, since every iteration of this format has the same",
            action="Choose settings with the same metrics, or train a new run",
        )
    if iteration:
        parent.select(iteration - 1)
    parent.record(parent.learner_ref(iteration))
    if capacity < max(iteration, 1):
        raise ValueError(f"capacity is {capacity}; the fork begins with {iteration} iterations and needs at least 1")
    with creating(path):
        while True:
            known = parent.files.segments.names()
            try:
                with _workshop(path) as folder:
                    follow(path)
                    check_free(path)
                    sharing = _Sharing(parent, iteration, folder, progress, new_metrics=new_metrics)
                    sharing.build(capacity, config, config_digest, environment)
                    _place(folder, path)
                    return Fork(path, iteration, *sharing.linked, *sharing.copied)
            except (FileNotFoundError, DamagedRun):
                # Otherwise packed in the meantime: the files to link have moved.
                if parent.files.segments.names() == known:
                    raise


class _Sharing:
    """Creation of a fork in a folder, with its parent's files as hard links if possible and as copies otherwise.

    `_records` are the shared outputs that are in no segment, or in the segment `_cut`, of which only a part is shared.
    """

    def __init__(self, parent: Run, iteration: int, folder: Path, progress: Progress, *, new_metrics: bool) -> None:
        self._parent = parent
        self._metrics_since = [i for i in parent.stages.metrics_since if i < iteration] + [iteration] * new_metrics
        self._files = files = parent.files
        self._iteration = iteration
        self._folder = folder
        self._progress = progress
        self._made: set[Path] = set()
        self.linked = (0, 0)
        self.copied = (0, 0)
        start = parent.learner_ref(0)
        refs = [ref for ref in files.live_refs() if ref.iteration < iteration or ref == start]
        segments = files.segments.all(refresh=True)
        self._segments = whole = [segment for segment in segments if segment.iterations.stop <= iteration]
        refs = [ref for ref in refs if not files.segments.holding(ref)]
        partly = (s for s in segments if s not in whole and (s.iterations.start < iteration or s.seal.holds(start)))
        self._cut = next(partly, None)
        if self._cut is not None:
            refs += [ref for ref in self._cut.seal.refs() if ref.iteration < iteration or ref == start]
        self._records = sorted((parent.record(ref) for ref in refs), key=lambda record: record.sequence)

    def build(
        self, capacity: int, config: Mapping[str, Any], config_digest: str, environment: Mapping[str, Any]
    ) -> None:
        chain = join(sealed_links(self._segments, self._records))
        newest = chain[-1].head
        self._share_sessions()
        session = begin_session(self._folder, take_over=False)
        try:
            write_skeleton(self._folder, session, capacity)
            self._share_outputs(session)
            for folder in sorted(self._made, reverse=True):
                sync_folder(folder)
            origin = {**self._origin(newest, config), "first_session": session.number}
            info = new_info(config, config_digest, environment, self._parent.stages, **origin)
            publish_info(self._folder, session, info)
            lost = missing_positions(self._parent.path, chain, newest.sequence)
            session.describe({"lost": lost, "next_sequence": newest.sequence + 1})
            session.seal(newest)
        finally:
            session.close()

    def _origin(self, newest: Head, config: Mapping[str, Any]) -> dict[str, Any]:
        parent = self._parent
        return {
            "parent": {
                "id": parent.info["id"],
                "name": parent.name,
                "iteration": self._iteration,
                "learner": parent.record(parent.learner_ref(self._iteration)).digest,
                "newest_record": newest.sha256,
                "changes": {name: [*values] for name, values in changed(parent.config, config).items()},
            },
            "ancestors": [*parent.info.get("ancestors", []), as_ancestor(parent.info)],
            "first_sequence": newest.sequence + 1,
            # Arrays keep the parent's format.
            "format": FORMATS[-1] if self._metrics_since else parent.info["format"],
            **({"metrics_since": self._metrics_since} if self._metrics_since else {}),
        }

    def _share_sessions(self) -> None:
        for session in sessions_in(self._parent.path):
            try:
                read_session(self._parent.path / "_sessions" / str(session))
            except (FileNotFoundError, DamagedRun):  # interrupted before writing anything, or reported by `verify`
                continue
            name = f"{session._replace(closed=True)}/session.json"
            try:
                self._share(f"_sessions/{session}/session.json", f"_sessions/{name}")
            except FileNotFoundError:  # it was closed meanwhile
                self._share(f"_sessions/{name}")

    def _share_outputs(self, session: Session) -> None:
        parent, files, records = self._parent, self._files, self._records
        live = [record for record in records if not files.segments.holding(record.ref)]
        own = {r.ref.iteration for r in live if r.ref != parent.learner_ref(0)}
        held = [*self._segments, *([self._cut] if self._cut else [])]
        self._share_markers(own | {i for segment in held for i in segment.iterations if i < self._iteration})
        arrays = {chunk.array for record in records for chunk in record.chunks}
        arrays.update(*(segment.seal.arrays for segment in self._segments))
        store = ArrayStore(CommittedFiles(self._folder, parent.stages), session, shards=has_shards(parent.info))
        store.adopt([files.spec(path) for path in sorted(arrays)])
        sizes = [sum(1 for _ in segment.seal.refs()) for segment in self._segments]
        total = sum(sizes) + len(records)
        for n, segment in enumerate(self._segments):
            self._progress(sum(sizes[:n]), total)
            self._share_segment(segment)
        if self._cut is not None:
            self._cut_segment(self._cut, [r for r in records if r not in live], session)
        thinned = CommittedFiles(self._folder, parent.stages)
        for n, record in enumerate(live):
            self._progress(total - len(live) + n, total)
            self._share(f"_commits/{record.ref.file_name}")
            gone = thinned.is_thinned(record)
            # The tables of an iteration belong to the record of its update.
            for file in (*(chunk for chunk in record.chunks if chunk.size and not gone), *record.tables):
                if not (parent.path / file.path).exists():
                    files.bring(file.path)
                try:
                    self._share(file.path)
                except FileNotFoundError:
                    if not files.is_thinned(record):
                        raise damaged(parent.path / file.path, "missing") from None
                    self._share_markers({record.ref.iteration})  # thinned meanwhile

    def _share_segment(self, segment: Segment) -> None:
        self._files.bring_all(self._logged(segment.folder))
        for folder, _, names in os.walk(segment.folder):
            for name in names:
                self._share((Path(folder) / name).relative_to(self._parent.path).as_posix())
        with suppress(FileNotFoundError):
            self._share(packed_marker_path(Path(), segment.iterations).as_posix())
        self._share_restored(segment)

    def _share_restored(self, segment: Segment) -> None:
        """Share outputs that were thinned and then restored after packing."""
        for array in segment.seal.arrays:
            folder = self._files.data / array
            logged = (path.rpartition("/")[2] for path in self._logged(folder))
            rows = {name: chunk_row(name) for name in {*os.listdir(folder), *logged}}
            held = (name for name, row in rows.items() if row is not None and segment.holds_row(array, row))
            restored = [f"data.zarr/{array}/{name}" for name in held]
            self._files.bring_all(restored)
            for path in restored:
                self._share(path)

    def _logged(self, folder: Path) -> list[str]:
        """Return the paths of a folder's files in object storage, if the parent is stored there."""
        remote, prefix = self._files.remote, folder.relative_to(self._parent.path).as_posix()
        return [path for path in remote.files if path.startswith(f"{prefix}/")] if remote is not None else []

    def _cut_segment(self, segment: Segment, records: list[StageRecord], session: Session) -> None:
        """Write the fork's part of a segment; files outside of shards are shared."""
        files = self._files
        iterations = range(segment.iterations.start, max(self._iteration, segment.iterations.start + 1))
        part = write_segment(files, session, iterations, records)
        make_folder(self._folder / SEGMENTS)
        target = self._folder / SEGMENTS / segment_name(iterations)
        session.place_folder(part, target)
        markers = {i: outputs for i, outputs in files.packed_markers(segment).items() if i < self._iteration}
        if markers:
            make_folder(self._folder / THINNED)
            path = packed_marker_path(self._folder, iterations)
            session.put({path: (render_packed_marker(iterations, markers),)})
        new = Segment(target)
        self._share_restored(new)
        rows: dict[str, str] = {}
        for record in records:
            for chunk in record.chunks:
                if chunk.size and not new.seal.arrays[chunk.array].sharded and not files.is_thinned(record):
                    spec, row = files.spec(chunk.array), files.row(record.ref, chunk.array)
                    old, own = segment.chunk_path(spec, row), new.chunk_path(spec, row)
                    rows[old.relative_to(self._parent.path).as_posix()] = own.relative_to(self._folder).as_posix()
        files.bring_all(rows)
        for path, new_path in rows.items():
            with suppress(FileNotFoundError):  # it was restored elsewhere
                self._share(path, new_path)

    def _share_markers(self, iterations: Collection[int]) -> None:
        for iteration in {*iterations}.intersection(self._files.live_markers()):
            self._share(marker_path(Path(), iteration).as_posix())

    def _share(self, name: str, new_name: str | None = None) -> None:
        source, target = self._parent.path / name, self._folder / (new_name or name)
        if target.parent not in self._made:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._made |= {folder for folder in target.parents if folder.is_relative_to(self._folder)}
        target.unlink(missing_ok=True)
        size = source.stat(follow_symlinks=False).st_size
        try:
            os.link(source, target, follow_symlinks=False)
            self.linked = (self.linked[0] + 1, self.linked[1] + size)
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
            with open(source, "rb") as old, open(target, "xb") as new:
                shutil.copyfileobj(old, new, 2**20)
                sync_file(new)
            self.copied = (self.copied[0] + 1, self.copied[1] + size)


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
