"""Reading of segments: contents, records, and rows of arrays."""

import hashlib
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, damaged
from metaloom.storage.format.arrays import ArraySpec, pread
from metaloom.storage.format.files import folder_entries, open_file, read_file
from metaloom.storage.format.records import StageRecord, parse_record
from metaloom.storage.format.segments import (
    FOLDER,
    RECORDS,
    SEAL,
    Link,
    Seal,
    index_size,
    join,
    place_in_shard,
    read_seal,
    segment_iterations,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

T = TypeVar("T")

LARGEST_FILE = 2**33
_CHUNK_NAME = re.compile(r"c\.([0-9]+)(\.0)*")
_IN_MEMORY = 2
TABLE_SCALE = 8


class Segment:
    """One segment of a run. `bring` downloads a file if it exists remotely.

    Methods raise DamagedRun for missing or damaged files, and FileNotFoundError if the segment was unpacked.
    """

    def __init__(self, folder: Path, seal: Seal | None = None, bring: Callable[[Path], object] | None = None) -> None:
        self.folder = folder
        self._bring = bring
        self._group: tuple[int, list[str]] = (-1, [])
        try:
            self.seal: Seal = seal or read_seal(folder)
        except FileNotFoundError as error:
            raise self.gone(error, folder / SEAL) from None

    @property
    def iterations(self) -> range:
        return self.seal.iterations

    def record(self, ref: StageRef) -> StageRecord:
        return self._record_at(self._rows[ref], ref)

    def digest(self, ref: StageRef) -> str:
        return self._digests[self._rows[ref]]

    def records(self) -> Iterator[StageRecord]:
        for ref, row in self._rows.items():
            yield self._record_at(row, ref)

    def check_links(self, links: Iterable[Link]) -> None:
        """Raise DamagedRun unless the seal's links match the links of all records."""
        if join(links) != self.seal.links:
            raise damaged(self.folder / SEAL, "does not list the chain links that its records form")

    def holds_row(self, path: str, row: int) -> bool:
        """Return True if a row lies in the segment's range of an array's rows."""
        array = self.seal.arrays.get(path)
        return array is not None and 0 <= row - array.first_row < array.rows

    def chunk_path(self, spec: ArraySpec, row: int) -> Path:
        array = self.seal.arrays[spec.path]
        return self.folder / "data.zarr" / spec.chunk_key(0 if array.sharded else row - array.first_row)

    def read_chunk(self, spec: ArraySpec, row: int, *, limit: int) -> bytes:
        """Read a row's chunk without checking its bytes. Raises FileNotFoundError if there is no such chunk."""
        array, path = self.seal.arrays[spec.path], self.chunk_path(spec, row)
        if not array.sharded:
            return self._at(path, lambda path: read_file(path, limit=limit))
        try:
            file = self._at(path, open_file)
        except FileNotFoundError as error:
            raise self.gone(error, path) from None
        with file:
            size = os.fstat(file.fileno()).st_size
            begin = size - index_size(array.rows)
            if begin < 0:
                raise damaged(path, f"holds {size} bytes, fewer than its index needs")
            index = pread(file.fileno(), size - begin, begin, path)
            place = place_in_shard(index, row - array.first_row, path)
            if place is None:
                raise FileNotFoundError(path)
            if place[1] > limit or sum(place) > begin:
                raise damaged(path, "its index points beyond the end of its data")
            return pread(file.fileno(), place[1], place[0], path)

    def table(self, name: str) -> "pa.Table | None":
        """Return the segment's rows of a derived table, or None if it has none."""
        path = f"tables/{name}.parquet"
        return self._parse_table(path, self.read(path)) if path in self.seal.files else None

    def check(self, path: str) -> None:
        """Check a file against the seal, and reject invalid tables."""
        raw = self.read(path)
        if path.startswith("tables/"):
            self._parse_table(path, raw)

    def _parse_table(self, path: str, raw: bytes) -> "pa.Table":
        from metaloom.storage.read.parquet import parse_table

        return parse_table(raw, self.folder / path, scale=TABLE_SCALE)

    def read(self, path: str) -> bytes:
        """Read and check a file listed in the seal."""
        expected = self.seal.files[path]
        try:
            raw = self._at(self.folder / path, lambda path: read_file(path, limit=min(LARGEST_FILE, expected.size)))
        except FileNotFoundError as error:
            raise self.gone(error, self.folder / path) from None
        if len(raw) != expected.size or hashlib.sha256(raw).hexdigest() != expected.sha256:
            raise damaged(self.folder / path, "its size or SHA-256 does not match the seal")
        return raw

    def has_place_for(self, path: str) -> bool:
        """Return True if a file may exist at a path relative to the segment's folder."""
        array, _, name = path.removeprefix("data.zarr/").rpartition("/")
        about = self.seal.arrays.get(array)
        own_chunk = about is not None and not about.sharded and chunk_row(name) is not None
        return path == SEAL or path in self.seal.files or own_chunk

    def _at(self, path: Path, read: Callable[[Path], T]) -> T:
        """Read a file, downloading it first if needed."""
        try:
            return read(path)
        except FileNotFoundError:
            if self._bring is not None:
                self._bring(path)
        return read(path)

    def forget(self) -> None:
        for name in ("_parquet", "_rows", "_digests"):
            self.__dict__.pop(name, None)
        self._group = (-1, [])

    def gone(self, error: FileNotFoundError, path: Path) -> Exception:
        """Return the error for a missing file: DamagedRun, or `error` if the whole segment is gone."""
        return damaged(path, "missing") if self.folder.is_dir() else error

    @cached_property
    def _parquet(self) -> "pq.ParquetFile":
        # Imported here because runs without segments do not need it.
        from metaloom.storage.read.parquet import open_records

        parquet = open_records(self.read(RECORDS), self.folder / RECORDS)
        about = parquet.metadata
        rows = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        if any(count != rows[0] or not count for count in rows[:-1]) or rows[-1:] > rows[:1]:
            raise damaged(self.folder / RECORDS, f"has groups of {rows} rows")
        return parquet

    def _columns(self, *names: str, group: int | None = None) -> list[list[object]]:
        from metaloom.storage.read.parquet import read_columns

        return read_columns(self._parquet, names, self.folder / RECORDS, group=group)

    @cached_property
    def _rows(self) -> dict[StageRef, int]:
        columns = self._columns("iteration", "stage", "step")
        try:
            refs = [StageRef(int(str(i)), str(stage), int(str(step))) for i, stage, step in zip(*columns, strict=True)]
        except ValueError as error:
            raise damaged(self.folder / RECORDS, f"names no outputs ({error})") from None
        rows = {ref: row for row, ref in enumerate(refs)}
        if {*rows} != {*self.seal.refs()}:
            raise damaged(self.folder / RECORDS, "does not contain the records that the seal lists")
        return rows

    @cached_property
    def _digests(self) -> list[str]:
        return [str(digest) for digest in self._columns("digest")[0]]

    def _record_at(self, row: int, ref: StageRef) -> StageRecord:
        size = self._parquet.metadata.row_group(0).num_rows
        if self._group[0] != row // size:
            (documents,) = self._columns("document", group=row // size)
            if None in documents:
                raise damaged(self.folder / RECORDS, "not a table of records (a document is missing)")
            self._group = (row // size, [str(document) for document in documents])
        record = parse_record(self._group[1][row % size].encode(), self.folder / RECORDS)
        if record.ref != ref:
            raise damaged(self.folder / RECORDS, f"has the record of {record.ref} instead of {ref}")
        if record.digest != self._digests[row]:
            raise damaged(self.folder / RECORDS, f"lists a digest of {ref} that differs from its record's")
        return record


class Segments:
    """Segments of a run as of the last listing of its folder. Thread-safe."""

    def __init__(self, root: Path, bring: Callable[[Path], object] | None = None) -> None:
        self._root = root
        self._bring = bring
        self._lock = threading.RLock()
        self._found: dict[tuple[str, int], Segment] | None = None
        self._order = _in_order([])
        self._used: list[Segment] = []

    def all(self, *, refresh: bool = False) -> list[Segment]:
        """Return the segments in iteration order. Raises DamagedRun if a seal is damaged or segments overlap."""
        with self._lock:
            if refresh or self._found is None:
                known, found = self._found or {}, dict[tuple[str, int], Segment]()
                for place in self._list():
                    with suppress(FileNotFoundError):  # unpacked since it was listed
                        found[place] = known.get(place) or self.open(place[0])
                self._found = found
                self._order = _in_order([*self._found.values()])
                _refuse_overlaps([*self._found.values()])
            return [*self._found.values()]

    def use(self, segments: Iterable[Segment]) -> list[tuple[Path, str]]:
        """Use these segments until the next listing; return the path and description of an overlap, if there is one."""
        with self._lock:
            ordered = sorted(segments, key=lambda segment: segment.iterations.start)
            self._found = {(segment.folder.name, 0): segment for segment in ordered}
            self._order = _in_order(ordered)
            try:
                _refuse_overlaps(ordered)
            except DamagedRun as error:
                return [(Path(error.where), error.found)]
            return []

    def names(self) -> list[str]:
        return [name for name, _ in self._list()]

    def holding(self, ref: StageRef) -> Segment | None:
        """Return the segment that contains an output, or None."""
        segment = self.about(ref.iteration)
        return segment if segment is not None and segment.seal.holds(ref) else None

    def about(self, iteration: int) -> Segment | None:
        """Return the segment that covers an iteration, or None."""
        if self._found is None:
            self.all()
        ends, segments = self._order  # read both at once, because another thread may refresh the list
        place = bisect_right(ends, iteration)
        return segments[place] if place < len(ends) and iteration in segments[place].iterations else None

    def record(self, ref: StageRef, segment: Segment) -> StageRecord:
        """Return the record of an output in a segment, keeping only recently used segments in memory."""
        with self._lock:
            self._keep(segment)
            return segment.record(ref)

    def digest(self, ref: StageRef, segment: Segment) -> str:
        """Return the digest of an output in a segment, keeping only recently used segments in memory."""
        with self._lock:
            self._keep(segment)
            return segment.digest(ref)

    def _keep(self, segment: Segment) -> None:
        """Mark a segment as most recently used; evict cached data of the least recently used ones over the limit."""
        if segment in self._used:
            self._used.remove(segment)
        self._used.append(segment)
        while len(self._used) > _IN_MEMORY:
            self._used.pop(0).forget()

    def _list(self) -> list[tuple[str, int]]:
        entries = folder_entries(self._root / FOLDER) or []
        return sorted((e.name, e.inode()) for e in entries if segment_iterations(e.name) is not None)

    def open(self, name: str) -> Segment:
        return Segment(self._root / FOLDER / name, bring=self._bring)


def _in_order(segments: list[Segment]) -> tuple[list[int], list[Segment]]:
    return [segment.iterations.stop for segment in segments], segments


def chunk_row(name: str) -> int | None:
    """Return the row of a chunk, given its file name; None for other names."""
    match = _CHUNK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _refuse_overlaps(segments: list[Segment]) -> None:
    for before, after in pairwise(segments):
        if after.iterations.start < before.iterations.stop:
            raise damaged(after.folder, f"covers iterations that {before.folder.name} also covers")
