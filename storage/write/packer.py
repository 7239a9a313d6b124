"""Packing many iterations' outputs into segments.

The order of the steps makes an interruption at any moment safe:

1. The segment is written in the session's folder, synced, and read back.
2. It appears in `_segments` atomically. From here on it replaces the original files.
3. Chunks of large arrays are linked into it instead of copied. Markers of thinned iterations are merged.
4. The replaced files are removed, records last, so that the next writer can finish an interrupted removal.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, StorageFailed, StoreError
from metaloom.storage.format.arrays import COMPRESS_FROM, ArraySpec, group_document
from metaloom.storage.format.files import Content, make_folder, read_file, render, sync_folder
from metaloom.storage.format.records import FORMATS, StageRecord, StoredFile
from metaloom.storage.format.segments import (
    FOLDER,
    RECORDS,
    SEAL,
    PackedArray,
    PackedFile,
    Seal,
    array_document,
    ranges,
    segment_name,
    shard_index,
)
from metaloom.storage.format.thinning import marker_path, packed_marker_path, render_packed_marker
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import TABLES, CommittedFiles
from metaloom.storage.read.history import Digests
from metaloom.storage.read.segments import LARGEST_FILE, Segment
from metaloom.storage.write.sessions import Session

SIZE = 500  # number of iterations in a segment
MARGIN = 100  # number of most recent iterations that stay unpacked during training

_LOG = logging.getLogger(__name__)


class Packer:
    """Packer of a run's iterations within a session."""

    def __init__(self, files: CommittedFiles, session: Session, digests: Digests, format: str) -> None:
        self._files = files
        self._session = session
        self._digests = digests
        self._format = format
        self._given_up = False

    def pack(self, progress: Progress = unseen) -> list[range]:
        """Pack all complete iterations but the newest; see `RunWriter.pack`."""
        if self._format == FORMATS[0]:
            raise StoreError(
                self._files.root,
                found=f"a run of format {self._format}, which versions without support for segments can read",
                required="a run of a later format",
                action="Leave it unpacked: it can still be read and resumed",
            )
        packed = [*self._packable(keep=1)]
        for n, iterations in enumerate(packed):
            progress(sum(map(len, packed[:n])), sum(map(len, packed)))
            self._pack(iterations)
        self._join_markers()
        return packed

    def pack_old(self) -> None:
        """Pack the oldest iterations once they fill a segment and the margin after it is complete."""
        if self._given_up or self._format == FORMATS[0] or len(self._digests.live_iterations()) < SIZE + MARGIN:
            return
        try:
            for iterations in self._packable(keep=MARGIN):
                if len(iterations) == SIZE:
                    self._pack(iterations)
                    self._join_markers()
        except DamagedRun as error:
            # Damage to old iterations is no reason to stop training, and retrying would not help.
            self._given_up = True
            _LOG.warning("old iterations are not packed: %s", error)

    def finish(self) -> None:
        """Finish packings that earlier sessions left unfinished."""
        unfinished = {segment for ref in self._files.live_refs() if (segment := self._files.segments.holding(ref))}
        for segment in unfinished:
            self._clear(segment)

    def _packable(self, *, keep: int) -> Iterator[range]:
        """Yield ranges of up to SIZE consecutive complete iterations outside of segments, except the newest `keep`."""
        last = self._files.stages.last_ref
        live = self._digests.live_iterations()
        newest = max((i for i in live if last(i) in self._digests), default=0)
        due = (i for i in live if i + keep <= newest and last(i) in self._digests)
        done = [i for i in due if not self._files.segments.about(i)]
        for _, group in groupby(done, self._files.stages.metrics_array):  # a segment's rows have the same metrics
            for part in ranges([*group]):
                yield from (part[start : start + SIZE] for start in range(0, len(part), SIZE))

    def _pack(self, iterations: range) -> None:
        root = self._files.root
        records = [self._files.record(ref) for i in iterations for ref in self._digests.of(i)]
        part = write_segment(self._files, self._session, iterations, records)
        make_folder(root / FOLDER)
        target = root / FOLDER / segment_name(iterations)
        marker = packed_marker_path(root, iterations)
        if marker.exists():  # left by an unpacked segment
            self._session.remove([marker])
            sync_folder(marker.parent)
        self._session.place_folder(part, target)
        self._files.segments.all(refresh=True)
        self._digests.packed(iterations)
        self._clear(self._files.segments.open(target.name), records)
        self._session.share()

    def _join_markers(self) -> None:
        about = (self._files.segments.about(i) for i in self._files.live_markers())
        for segment in {segment for segment in about if segment is not None}:
            _join_markers(self._files, self._session, segment)

    def _clear(self, segment: Segment, records: Sequence[StageRecord] | None = None) -> None:
        """Remove the files that a segment replaces."""
        files, root = self._files, self._files.root
        records = [*segment.records()] if records is None else records
        thinned = _join_markers(files, self._session, segment)
        whole = (record for record in records if thinned.get(record.ref) != record.sha256)
        chunks = [(record, chunk) for record in whole for chunk in record.chunks if chunk.size]
        moved = [files.files_of(record, chunk) for record, chunk in chunks]
        self._session.link({paths[0]: paths[1] for paths in moved if len(paths) == 2})
        tables = [root / table.path for record in records for table in record.tables]
        replaced = [*(root / chunk.path for _, chunk in chunks), *tables]
        self._session.remove(replaced)
        for folder in {path.parent for path in replaced}:
            sync_folder(folder)
        # A record that reappears after a power failure is removed by the next writer; see `finish`.
        self._session.remove(files.record_path(record.ref) for record in records)


def write_segment(files: CommittedFiles, session: Session, iterations: range, records: Sequence[StageRecord]) -> Path:
    """Write a segment into a session's folder, sync it and read it back; return the segment's folder."""
    by_ref = {record.ref: record for record in records}
    copied = [file for r in records for file in (*r.tables, *(c for c in r.chunks if _is_small(files.spec(c.array))))]
    files.bring_all(file.path for file in copied)
    written: dict[str, PackedFile] = {}
    ordered = [by_ref[ref] for ref in files.stages.sort(by_ref)]
    part = session.write_folder(_contents(files, iterations, ordered, written))
    for name, file in written.items():
        raw = read_file(part / name, limit=LARGEST_FILE)
        if (len(raw), hashlib.sha256(raw).hexdigest()) != (file.size, file.sha256):
            raise StorageFailed(
                part / name,
                found="bytes that differ from what was written",
                required="a disk that stores data reliably",
                action="Check the disk. Nothing was lost: the unpacked files are unchanged",
            )
    return part


def _contents(
    files: CommittedFiles, iterations: range, records: Sequence[StageRecord], written: dict[str, PackedFile]
) -> Iterator[tuple[str, Content]]:
    """Yield a segment's files, the seal last, and add descriptions of the other files to `written`."""
    arrays = packed_arrays(files, records)
    for name, content in _payload(files, iterations, records, arrays):
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        written[name] = PackedFile(sum(map(len, content)), digest.hexdigest())
        yield name, content
    yield SEAL, (Seal.of(iterations, records, arrays, written).content(),)


def _payload(
    files: CommittedFiles, iterations: range, records: Sequence[StageRecord], arrays: Mapping[str, PackedArray]
) -> Iterator[tuple[str, Content]]:
    from metaloom.storage.write.packed_tables import records_file, table_file

    yield RECORDS, (records_file(records),)
    for name in TABLES:
        if raw := table_file(files, name, records):
            yield f"tables/{name}.parquet", (raw,)
    for group in sorted({path.partition("/")[0] for path in arrays} | {""}):
        name = f"data.zarr/{group}/zarr.json" if group else "data.zarr/zarr.json"
        yield name, (render(group_document({}), indented=True),)
    thinned = files.thinned_in(iterations)
    whole: dict[str, list[tuple[StageRecord, StoredFile]]] = {path: [] for path in arrays}
    for record in (record for record in records if thinned.get(record.ref) != record.sha256):
        for chunk in record.chunks:
            whole[chunk.array].append((record, chunk))
    for path, array in arrays.items():
        spec = files.spec(path)
        yield f"data.zarr/{path}/zarr.json", (render(array_document(spec, array), indented=True),)
        if array.sharded:
            found = {files.row(record.ref, path): files.read_bytes(record, chunk) for record, chunk in whole[path]}
            rows = [found.get(array.first_row + n) for n in range(array.rows)]
            index = shard_index([None if chunk is None else len(chunk) for chunk in rows])
            yield f"data.zarr/{spec.chunk_key(0)}", (*(chunk for chunk in rows if chunk is not None), index)


def packed_arrays(files: CommittedFiles, records: Iterable[StageRecord]) -> dict[str, PackedArray]:
    """Return how each array is packed in a segment of these records; small arrays become one file each."""
    rows: dict[str, list[int]] = {}
    for record in records:
        for chunk in record.chunks:
            rows.setdefault(chunk.array, []).append(files.row(record.ref, chunk.array))
    return {
        path: PackedArray(min(found), max(found) + 1 - min(found), _is_small(files.spec(path)))
        for path, found in rows.items()
    }


def _is_small(spec: ArraySpec) -> bool:
    """Return True if an array's rows are copied into one file. Rows of sharded arrays never are."""
    return 0 < spec.raw_bytes < COMPRESS_FROM and not spec.sharded


def _join_markers(files: CommittedFiles, session: Session, segment: Segment) -> Mapping[StageRef, str]:
    """Merge per-iteration markers into the segment's marker; return the record hashes of its thinned outputs."""
    live = [i for i in files.live_markers() if i in segment.iterations]
    thinned = {**files.packed_markers(segment), **{i: files.thinned(i) for i in live}}
    if live:
        path = packed_marker_path(files.root, segment.iterations)
        session.put({path: (render_packed_marker(segment.iterations, thinned),)})
        session.remove(marker_path(files.root, i) for i in live)  # a marker that reappears is equivalent
    return {ref: sha256 for outputs in thinned.values() for ref, sha256 in outputs.items()}
