"""Committed content of a run's folder: the index of records, and files checked against them before use."""

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.storage.errors import damaged
from metaloom.storage.format.arrays import ArraySpec, read_metadata, read_spec
from metaloom.storage.format.chunks import check_chunk, crc32c, decode_chunk, largest_chunk
from metaloom.storage.format.codec import Stored, Value, decode
from metaloom.storage.format.files import read_file
from metaloom.storage.format.layout import plan_of
from metaloom.storage.format.records import StageRecord, StoredFile, read_record
from metaloom.storage.format.refs import StageRef
from metaloom.storage.format.stages import METRICS_GROUP, StageTable
from metaloom.storage.keep.thinning import FOLDER, marked_iteration, marker_path, read_marker, thinned_error
from metaloom.storage.remote.log import RemoteLog

TABLES = ("episodes", "tasks", "metrics", "evaluations")
"""The tables that are derived from iterations."""

_ARRAY_PATH = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LARGEST_TABLE = 2**30


class CommittedFiles:
    """The committed content of one run's folder.

    Args:
        root: the folder.
        stages: of the run.
        remote: the log of the run that the folder caches, None if it is the run itself.
    """

    def __init__(self, root: Path, stages: StageTable, remote: RemoteLog | None = None) -> None:
        self.root = root
        self.stages = stages
        self.data = root / "data.zarr"
        self.remote = remote
        self._specs: dict[str, ArraySpec] = {}

    def table_stages(self, name: str) -> tuple[str, ...]:
        """The stages whose records commit an iteration's part of a table."""
        return self.stages.yielding("Evaluation") if name == "evaluations" else (self.stages.last,)

    def stored_size(self, path: str) -> int:
        """The bytes of a file of the run, in the folder or in the object store that it caches.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedRun: a folder is in its place.
        """
        try:
            status = (self.root / path).stat(follow_symlinks=False)
        except FileNotFoundError:
            if self.remote is None or path not in self.remote.files:
                raise
            return self.remote.files[path].size
        if stat.S_ISDIR(status.st_mode):
            raise damaged(self.root / path, "is a folder, not a file")
        return status.st_size

    def sizes(self) -> dict[str, int]:
        """The bytes of every file of the run by its path, those included that are only in the object store."""
        sizes = {name: file.size for name, file in self.remote.files.items()} if self.remote else {}
        return sizes | dict(_sizes(self.root, ""))

    def num_bytes(self) -> int:
        """Sum up the sizes of all files of the run."""
        return sum(self.sizes().values())

    def bring(self, path: str) -> bool:
        """Bring a file that is only in the object store into the folder; False if there is none.

        Raises:
            DamagedRun: it is not what was committed.
        """
        return self.remote is not None and self.remote.fetch(path)

    def refs(self) -> set[StageRef]:
        """Every stored output.

        Raises:
            DamagedRun: the folder of records is missing.
        """
        try:
            names = os.listdir(self.root / "_commits")
        except (FileNotFoundError, NotADirectoryError):
            raise damaged(self.root / "_commits", "is missing") from None
        refs = (StageRef.from_file_name(name) for name in names)
        return {ref for ref in refs if ref is not None and ref.stage in self.stages}

    def record_path(self, ref: StageRef) -> Path:
        """The file whose existence makes an output exist."""
        return self.root / "_commits" / ref.file_name

    def record(self, ref: StageRef) -> StageRecord:
        """An output's record.

        Raises:
            FileNotFoundError: the output is not stored.
            DamagedRun: the record is not what was written.
        """
        return read_record(self.record_path(ref))

    def thinned(self, iteration: int) -> dict[StageRef, str]:
        """The outputs of an iteration that a marker calls thinned, with the hash of the record that it means.

        Raises:
            DamagedRun: the marker is not what was written.
        """
        try:
            return read_marker(marker_path(self.root, iteration), self.stages)
        except FileNotFoundError:
            return {}

    def thinned_iterations(self) -> list[int]:
        """The iterations of which something was thinned."""
        try:
            names = os.listdir(self.root / FOLDER)
        except FileNotFoundError:
            return []
        return sorted(i for name in names if (i := marked_iteration(name)) is not None)

    def is_thinned(self, record: StageRecord) -> bool:
        """Tell whether the arrays that a record commits were removed on purpose."""
        # A marker means one record: what was computed again since has its arrays.
        return self.thinned(record.ref.iteration).get(record.ref) == record.sha256

    def spec(self, path: str) -> ArraySpec:
        """The metadata of an array below `data.zarr`.

        Raises:
            DamagedRun: it is missing, changed, or of an array that no run has.
        """
        if path not in self._specs:
            file = self.data / path / "zarr.json"
            if not _ARRAY_PATH.fullmatch(path) or plan_of(path, self.stages) is None:
                raise damaged(self.data, f"a record names the array {path!r}, which no run has")
            try:
                self._specs[path] = read_spec(self.data, path)
            except FileNotFoundError:
                raise damaged(file, "is missing") from None
        return self._specs[path]

    def capacity(self) -> int:
        """Read how many iterations the arrays have room for.

        Raises:
            DamagedRun: the metadata that says so is missing or changed.
        """
        path = self.data / "zarr.json"
        try:
            return int(read_metadata(path)["attributes"]["capacity"])
        except FileNotFoundError:
            raise damaged(path, "is missing") from None
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"names no capacity ({type(error).__name__})") from None

    def forget_specs(self) -> None:
        """Read metadata again when it is next needed, because it was rewritten."""
        self._specs.clear()

    def read_value(self, record: StageRecord) -> Value:
        """The output that a record commits.

        Raises:
            DamagedRun: a file of it is missing or changed, or its arrays do not fit together.
        """
        return self.decode(record, self.read_arrays(record))

    def decode(self, record: StageRecord, groups: Mapping[str, Stored]) -> Value:
        """The output that the arrays of a record make up.

        Raises:
            DamagedRun: arrays are missing or do not fit together.
        """
        group = self.stages.group_of(record.ref)
        try:
            return decode(self.stages[record.ref.stage].output, group, {group: {}, **groups})
        except (KeyError, ValueError, TypeError, IndexError) as error:
            where = self.record_path(record.ref)
            raise damaged(where, f"its arrays do not make up {record.ref} ({type(error).__name__}: {error})") from None

    def read_arrays(self, record: StageRecord, names: Collection[str] | None = None) -> dict[str, Stored]:
        """The arrays of an output by group and name; only the named ones if names are given."""
        groups: dict[str, dict[str, tuple[Array, Mapping[str, Any]]]] = {}
        for chunk in record.chunks:
            group, _, name = chunk.array.partition("/")
            if names is None or name in names:
                groups.setdefault(group, {})[name] = self.read_row(record, chunk)
        return {**groups}

    def read_lengths(self, record: StageRecord) -> Array:
        """Read how many steps each episode of a batch has, and nothing else of it: [B, E] int32.

        Raises:
            DamagedRun: it is not what was committed, or no batch of episodes.
        """
        group = self.stages.group_of(record.ref)
        arrays = self.read_arrays(record, ("lengths",)).get(group, {})
        if "lengths" not in arrays:
            raise damaged(self.record_path(record.ref), "commits no episodes")
        lengths = arrays["lengths"][0]
        T = self.spec(f"{group}/rewards").shape[2]
        if not (lengths.ndim == 2 and lengths.any() and lengths.min() >= 0 and lengths.max() <= T):
            raise damaged(self.record_path(record.ref), f"its lengths are not those of episodes of at most {T} steps")
        return lengths

    def read_experience(self, record: StageRecord) -> EpisodeBatch:
        """Read a batch of episodes without behavior, reward terms and initial states: what transitions are made of.

        Raises:
            DamagedRun: it is not what was committed, or no batch of episodes.
        """
        names = [field.name for field in fields(EpisodeBatch) if field.name != "initial_state"]
        groups = self.read_arrays(record, names)
        group = self.stages.group_of(record.ref)
        if "lengths" in (stored := groups.get(group, {})):
            no_state = np.zeros((*stored["lengths"][0].shape, 0))
            groups = {**groups, group: {**stored, "initial_state": (no_state, {})}}
        value = self.decode(record, groups)
        if not isinstance(value, EpisodeBatch):
            raise damaged(self.record_path(record.ref), "commits no episodes")
        return value

    def read_bytes(self, record: StageRecord, file: StoredFile) -> bytes:
        """The bytes of a file that a record commits, checked.

        Raises:
            DamagedRun: it is missing or changed, or the record names a file that is not its own.
            StageThinned: it was removed on purpose.
        """
        if file.path not in self._own_places(record.ref, file):
            raise damaged(self.record_path(record.ref), f"names {file.path}, which is not its own")
        path = self.root / file.path
        limit = largest_chunk(self.spec(file.array)) if file.array else _LARGEST_TABLE
        raw = self._read_unless_thinned(record, path, limit)
        (check_chunk if file.array else _check_table)(raw, path, size=file.size, crc=file.crc32c)
        return raw

    def read_row(self, record: StageRecord, chunk: StoredFile) -> tuple[Array, Mapping[str, Any]]:
        """The row of an array that a record commits, with the attributes of the array.

        Raises:
            DamagedRun: its file is missing or changed.
        """
        spec = self.spec(chunk.array)
        if spec.raw_bytes == 0:  # no entries, no file
            return np.empty(spec.shape, spec.dtype), spec.attributes
        return decode_chunk(self.read_bytes(record, chunk), spec, self.root / chunk.path), spec.attributes

    def _read_unless_thinned(self, record: StageRecord, path: Path, limit: int) -> bytes:
        for _ in range(2):  # it may come back between the look for the file and the look for the marker
            try:
                return read_file(path, limit=limit)
            except FileNotFoundError:
                if self.is_thinned(record):
                    raise thinned_error(self.root, record.ref) from None
                self.bring(path.relative_to(self.root).as_posix())
        raise damaged(path, "is missing")

    def _own_places(self, ref: StageRef, file: StoredFile) -> tuple[str, ...]:
        if not file.array:
            return tuple(table_path(name, ref.iteration) for name in TABLES if ref.stage in self.table_stages(name))
        row = ref.iteration if file.array.startswith(f"{METRICS_GROUP}/") else self.stages.row_of(ref)
        return (f"data.zarr/{self.spec(file.array).chunk_key(row)}",)


def bytes_in(folder: Path) -> int:
    """Sum up the sizes of all files in a folder, whether or not it is a run."""
    return sum(size for _, size in _sizes(folder, ""))


def table_path(name: str, iteration: int) -> str:
    """Path of one iteration's part of a table, below the run's folder."""
    return f"tables/{name}/{iteration:08d}.parquet"


def _check_table(raw: bytes, where: Path, *, size: int, crc: int) -> None:
    if len(raw) != size or crc32c(raw) != crc:
        raise damaged(where, "its size or CRC-32C is not the committed one")


def _sizes(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    # os.scandir, because a long run has tens of thousands of files; vanishing ones are a writer's temporary files.
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path), f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return
