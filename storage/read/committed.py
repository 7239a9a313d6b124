"""Committed content of a run: the index of records, and files checked against the records."""

import os
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.storage.errors import StorageFailed, damaged
from metaloom.storage.format.arrays import (
    ARRAY_PATH,
    ArraySpec,
    ShardPart,
    check_chunk,
    check_parts,
    crc32c,
    decode_chunk,
    decode_parts,
    largest_chunk,
    read_metadata,
    read_parts,
    read_spec,
)
from metaloom.storage.format.codec import Stored, Value, decode
from metaloom.storage.format.files import folder_entries, open_file, read_file
from metaloom.storage.format.records import StageRecord, StoredFile, read_record
from metaloom.storage.format.segments import RECORDS
from metaloom.storage.format.stages import METRICS_GROUP, StageTable, plan_of
from metaloom.storage.format.thinning import (
    FOLDER,
    marked_iteration,
    marker_path,
    packed_marker_path,
    read_marker,
    read_packed_marker,
    thinned_error,
)
from metaloom.storage.read.segments import Segment, Segments
from metaloom.storage.remote.log import RemoteLog

T = TypeVar("T")

TABLES = ("episodes", "tasks", "metrics", "evaluations")  # names of the tables derived from iterations

_LARGEST_TABLE = 2**30


class CommittedFiles:
    """Committed content of a run's folder; `remote` is the log in object storage if the folder is a cache.

    Methods raise DamagedRun for files that are missing or differ from what was committed, and for missing folders.
    """

    def __init__(self, root: Path, stages: StageTable, remote: RemoteLog | None = None) -> None:
        self.root = root
        self.stages = stages
        self.data: Path = root / "data.zarr"
        self.remote = remote
        self.segments: Segments = Segments(root, self._bring)
        self._specs: dict[str, ArraySpec] = {}
        self._markers: dict[Path, tuple[tuple[int, int, int], Mapping[int, dict[StageRef, str]]]] = {}

    def table_stages(self, name: str) -> tuple[str, ...]:
        """Return the names of the stages whose records commit an iteration's part of a table."""
        evaluate = tuple(stage.name for stage in self.stages.stages if stage.output == "Evaluation")
        return evaluate if name == "evaluations" else (self.stages.last,)

    def stored_size(self, path: str) -> int:
        """Return the size of a file in the folder or object storage. Raises FileNotFoundError if there is none."""
        try:
            status = (self.root / path).stat(follow_symlinks=False)
        except FileNotFoundError:
            if self.remote is None or path not in self.remote.files:
                raise
            return self.remote.files[path].size
        if stat.S_ISDIR(status.st_mode):
            raise damaged(self.root / path, "a folder, not a file")
        return status.st_size

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files of the run, keyed by path, including files only in object storage."""
        sizes = {name: file.size for name, file in self.remote.files.items()} if self.remote else {}
        return sizes | {path: status.st_size for path, status in file_stats(self.root)}

    def num_bytes(self) -> int:
        return sum(self.sizes().values())

    def bring(self, path: str) -> bool:
        """Download a file that is only in object storage; return False if it does not exist."""
        return self.remote is not None and self.remote.fetch(path)

    def is_stored(self, path: Path) -> bool:
        return path.is_file() or (self.remote is not None and self._name(path) in self.remote.files)

    def bring_all(self, paths: Iterable[str]) -> None:
        if self.remote is not None:
            self.remote.fetch_all(paths)

    def _bring(self, path: Path) -> None:
        self.bring(self._name(path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def refs(self, iterations: Collection[int] | None = None) -> set[StageRef]:
        """Return references to the stored outputs of all or some iterations."""
        # In this order, so that outputs packed in the meantime are found in a segment.
        refs = self.live_refs(iterations)
        for segment in self.segments.all(refresh=True):
            some = None if iterations is None else [i for i in iterations if i in segment.iterations]
            refs.update(segment.seal.refs(some))
        return refs

    def live_refs(self, iterations: Collection[int] | None = None) -> set[StageRef]:
        """Return references to outputs whose records are separate files, for all or some iterations."""
        if (entries := folder_entries(self.root / "_commits")) is None:
            raise damaged(self.root / "_commits", "missing")
        names = [entry.name for entry in entries]
        if iterations is not None:  # avoid parsing thousands of other names
            wanted = {f"{i:08d}" for i in iterations}
            names = [name for name in names if name.partition(".")[0] in wanted]
        refs = (StageRef.from_file_name(name) for name in names)
        return {ref for ref in refs if ref is not None and ref.stage in self.stages}

    def num_iterations(self) -> int:
        """Return the number of complete iterations before the first incomplete one."""
        done = {ref.iteration for ref in self.live_refs() if ref.stage == self.stages.last}
        ends, segments = (self.stages.last, 0), self.segments.all(refresh=True)
        packed = [part for segment in segments for part in segment.seal.outputs.get(ends, ())]
        count = 0
        while found := next((part for part in packed if count in part), range(count, count + (count in done))):
            count = found.stop
        return count

    def contains(self, ref: StageRef) -> bool:
        if self.segments.holding(ref) or self.record_path(ref).exists():
            return True
        self.segments.all(refresh=True)  # the output may have been packed since they were listed
        return self.segments.holding(ref) is not None

    def record_path(self, ref: StageRef) -> Path:
        """Return the path of the file whose existence commits an output, unless a segment contains the output."""
        return self.root / "_commits" / ref.file_name

    def record_place(self, ref: StageRef) -> Path:
        """Return the path of the file that contains an output's record."""
        segment = self.segments.holding(ref)
        return self.record_path(ref) if segment is None else segment.folder / RECORDS

    def record(self, ref: StageRef) -> StageRecord:
        """Read an output's record. Raises FileNotFoundError if the output is not stored."""
        try:
            return self._record(ref)
        except FileNotFoundError:  # packed or unpacked between the lookup and this read
            self.segments.all(refresh=True)
            return self._record(ref)

    def _record(self, ref: StageRef) -> StageRecord:
        segment = self.segments.holding(ref)
        return read_record(self.record_path(ref)) if segment is None else self.segments.record(ref, segment)

    def thinned(self, iteration: int) -> dict[StageRef, str]:
        """Return an iteration's outputs that are marked as thinned, with their record hashes."""
        for _ in range(2):  # it may have been packed between the two lookups
            try:
                return read_marker(marker_path(self.root, iteration), self.stages)
            except FileNotFoundError:
                segment = self.segments.about(iteration)
                if segment is None and self.segments.all(refresh=True) and self.segments.about(iteration):
                    continue
                return self.packed_markers(segment).get(iteration, {}) if segment else {}
        return {}

    def thinned_in(self, iterations: range) -> dict[StageRef, str]:
        """Return the outputs of several iterations that are marked as thinned, with their record hashes."""
        live = {*self.live_markers()}
        marked = (i for i in iterations if i in live or self.segments.about(i) is not None)
        return {ref: sha256 for i in marked for ref, sha256 in self.thinned(i).items()}

    def packed_markers(self, segment: Segment) -> Mapping[int, dict[StageRef, str]]:
        """Return record hashes of a segment's thinned outputs by iteration. An iteration's marker takes precedence."""
        path = packed_marker_path(self.root, segment.iterations)
        try:
            status = os.stat(path)
            key = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._markers.get(path, (None, {}))[0] != key:
                self._markers[path] = (key, read_packed_marker(path, segment.iterations, self.stages))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return self._markers[path][1]

    def live_markers(self) -> list[int]:
        """Return the iterations that have a separate marker, in order."""
        entries = folder_entries(self.root / FOLDER) or []
        return sorted(i for entry in entries if (i := marked_iteration(entry.name)) is not None)

    def thinned_iterations(self) -> list[int]:
        """Return the iterations that are at least partly thinned, in order."""
        packed = {i for segment in self.segments.all(refresh=True) for i in self.packed_markers(segment)}
        # An iteration's marker overrides its segment's marker, and may be empty.
        live = {i for i in self.live_markers() if self.segments.about(i) is None or self.thinned(i)}
        return sorted(live | {i for i in packed if self.thinned(i)})

    def is_thinned(self, record: StageRecord) -> bool:
        # A marker refers to one record; an output recomputed since then has its arrays.
        return self.thinned(record.ref.iteration).get(record.ref) == record.sha256

    def spec(self, path: str) -> ArraySpec:
        if path not in self._specs:
            file = self.data / path / "zarr.json"
            if not ARRAY_PATH.fullmatch(path) or plan_of(path, self.stages) is None:
                raise damaged(self.data, f"a record names the array {path!r}, which is not part of a run")
            try:
                self._specs[path] = read_spec(self.data, path)
            except FileNotFoundError:
                raise damaged(file, "missing") from None
        return self._specs[path]

    def capacity(self) -> int:
        path = self.data / "zarr.json"
        try:
            return int(read_metadata(path)["attributes"]["capacity"])
        except FileNotFoundError:
            raise damaged(path, "missing") from None
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"has no valid capacity ({type(error).__name__})") from None

    def forget_specs(self) -> None:
        self._specs.clear()

    def read_value(self, record: StageRecord, tasks: Sequence[int] | None = None) -> Value:
        """Read a record's output, or some tasks' parts of it."""
        return self.decode(record, self.read_arrays(record, tasks=tasks))

    def decode(self, record: StageRecord, groups: Mapping[str, Stored]) -> Value:
        group = self.stages.group_of(record.ref)
        try:
            return decode(self.stages[record.ref.stage], group, {group: {}, **groups})
        except (KeyError, ValueError, TypeError, IndexError) as error:
            where = self.record_place(record.ref)
            raise damaged(where, f"its arrays do not form {record.ref} ({type(error).__name__}: {error})") from None

    def read_arrays(
        self, record: StageRecord, names: Collection[str] | None = None, tasks: Sequence[int] | None = None
    ) -> dict[str, Stored]:
        """Read an output's arrays, keyed by group and name; optionally only some names and tasks."""
        groups: dict[str, dict[str, tuple[Array, Mapping[str, Any]]]] = {}
        for chunk in record.chunks:
            group, _, name = chunk.array.partition("/")
            if names is None or name in names:
                groups.setdefault(group, {})[name] = self.read_row(record, chunk, tasks)
        return {**groups}

    def read_lengths(self, record: StageRecord) -> Array:
        """Read only the episode lengths of a batch, [B, E] int32."""
        group = self.stages.group_of(record.ref)
        arrays = self.read_arrays(record, ("lengths",)).get(group, {})
        if "lengths" not in arrays:
            raise damaged(self.record_place(record.ref), "commits no episodes")
        lengths = arrays["lengths"][0]
        T = self.spec(f"{group}/rewards").shape[2]
        if not (lengths.ndim == 2 and lengths.any() and lengths.min() >= 0 and lengths.max() <= T):
            raise damaged(self.record_place(record.ref), f"its lengths are invalid for episodes of at most {T} steps")
        return lengths

    def read_experience(self, record: StageRecord) -> EpisodeBatch:
        """Read a batch of episodes without behavior, reward terms, facts and initial states."""
        names = [field.name for field in fields(EpisodeBatch) if field.name != "initial_state"]
        groups = self.read_arrays(record, names)
        group = self.stages.group_of(record.ref)
        if "lengths" in (stored := groups.get(group, {})):
            no_state = np.zeros((*stored["lengths"][0].shape, 0))
            groups = {**groups, group: {**stored, "initial_state": (no_state, {})}}
        value = self.decode(record, groups)
        if not isinstance(value, EpisodeBatch):
            raise damaged(self.record_place(record.ref), "commits no episodes")
        return value

    def read_bytes(self, record: StageRecord, file: StoredFile) -> bytes:
        """Read and check the bytes of a record's table or chunk. Raises StageThinned if thinning removed the file."""
        limit = largest_chunk(self.spec(file.array)) if file.array else _LARGEST_TABLE
        raw, path = self._unless_thinned(record, file, lambda: self._bytes_at(record, file, limit))
        if file.array:
            check_chunk(raw, path, size=file.size, crc=file.crc32c)
        elif len(raw) != file.size or crc32c(raw) != file.crc32c:
            raise damaged(path, "its size or CRC-32C differs from the committed one")
        return raw

    def check(self, record: StageRecord, file: StoredFile) -> None:
        """Check a file against its record without decoding it. Raises the same errors as `read_bytes`."""
        if not (file.array and self.spec(file.array).sharded):
            self.read_bytes(record, file)
            return
        with self._shard(record, file) as (descriptor, parts, where):
            check_parts(descriptor, parts, where)

    def read_row(
        self, record: StageRecord, chunk: StoredFile, tasks: Sequence[int] | None = None
    ) -> tuple[Array, Mapping[str, Any]]:
        """Read a record's row in an array, and the array's attributes. Raises the same errors as `read_bytes`.

        `tasks` selects tasks if the array has a task axis. From a shard, only the parts of these tasks are read.
        """
        spec, where = self.spec(chunk.array), self.root / chunk.path
        if tasks is not None and (spec.dims[1:2] != ("task",) or [*tasks] == [*range(spec.shape[0])]):
            tasks = None
        if spec.sharded:
            with self._shard(record, chunk) as (descriptor, parts, where):
                chosen = parts if tasks is None else [parts[task] for task in tasks]
                return decode_parts(descriptor, chosen, spec, where), spec.attributes
        if spec.raw_bytes == 0:  # no entries, no file
            row = np.empty(spec.shape, spec.dtype)
        else:
            row = decode_chunk(self.read_bytes(record, chunk), spec, where)
        return (row if tasks is None else row[[*tasks]]), spec.attributes

    def files_of(self, record: StageRecord, chunk: StoredFile) -> list[Path]:
        """Return the paths at which a file with only this chunk may exist; empty if the chunk is only in a shard."""
        if not chunk.size:
            return []
        segment, row = self.segments.about(record.ref.iteration), self.row(record.ref, chunk.array)
        live = self.root / chunk.path
        if segment is None or not segment.holds_row(chunk.array, row):
            return [live]
        if segment.seal.arrays[chunk.array].sharded:
            return [live] if live.exists() else []
        return [live, segment.chunk_path(self.spec(chunk.array), row)]

    @contextmanager
    def _shard(self, record: StageRecord, file: StoredFile) -> Generator[tuple[int, list[ShardPart], Path]]:
        """Yield a shard's open file descriptor, parts and path; the file is closed after the block."""
        opened, where = self._unless_thinned(
            record, file, lambda: [(partial(open_file, path), path) for path in reversed(self.files_of(record, file))]
        )
        with opened:
            descriptor = opened.fileno()
            parts = read_parts(descriptor, self.spec(file.array), where, size=file.size, crc=file.crc32c)
            yield descriptor, parts, where

    def _unless_thinned(
        self, record: StageRecord, file: StoredFile, places: Callable[[], Iterable[tuple[Callable[[], T], Path]]]
    ) -> tuple[T, Path]:
        """Return the value read at the first existing location, and its path. Raises StageThinned or DamagedRun."""
        if file.array:
            own = [f"data.zarr/{self.spec(file.array).chunk_key(self.row(record.ref, file.array))}"]
        else:
            tables = [name for name in TABLES if record.ref.stage in self.table_stages(name)]
            own = [table_path(name, record.ref.iteration) for name in tables]
        if file.path not in own:
            raise damaged(self.record_place(record.ref), f"names {file.path}, which is not its own")
        # The output may be restored or packed, even by another process, between the lookups of file and marker.
        for _ in range(3):
            found = [*places()]
            for read, path in found:
                try:
                    return read(), path
                except FileNotFoundError:
                    continue
            if self.is_thinned(record):
                raise thinned_error(self.root, record.ref) from None
            for _, path in found:
                self._bring(path)
            self.segments.all(refresh=True)
        raise damaged(self.root / file.path, "missing")

    def _bytes_at(
        self, record: StageRecord, file: StoredFile, limit: int
    ) -> Iterator[tuple[Callable[[], bytes], Path]]:
        """Yield a reader and a path for each copy of a file's bytes; a copy in a segment comes first."""
        segment = self.segments.about(record.ref.iteration) if file.array else None
        if segment is not None:
            spec, row = self.spec(file.array), self.row(record.ref, file.array)
            if segment.holds_row(file.array, row):
                yield lambda: segment.read_chunk(spec, row, limit=limit), segment.chunk_path(spec, row)
        path = self.root / file.path
        yield lambda: read_file(path, limit=limit), path

    def row(self, ref: StageRef, array: str) -> int:
        return ref.iteration if array.startswith(f"{METRICS_GROUP}/") else self.stages.row_of(ref)


def bytes_in(folder: Path) -> int:
    """Return the total size in bytes of the files in a folder, which need not be a run."""
    return sum(status.st_size for _, status in file_stats(folder))


def file_stats(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and stat result of each file below a folder, except in unreadable or linked folders."""
    try:
        entries = folder_entries(folder) or ()
    except StorageFailed as error:
        if isinstance(error.__cause__, PermissionError):
            return
        raise
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from file_stats(Path(entry.path), f"{prefix}{entry.name}/")
        else:
            with suppress(FileNotFoundError):  # a writer's temporary file
                yield prefix + entry.name, entry.stat(follow_symlinks=False)


def table_path(name: str, iteration: int) -> str:
    return f"tables/{name}/{iteration:08d}.parquet"
