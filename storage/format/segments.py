"""Segments: all outputs of consecutive iterations in a few sealed files.

A segment is a folder `_segments/{first}-{last}` that appears atomically and never changes. Its seal lists its outputs
and their positions in the chain of records, so readers can follow the chain without reading the records.
"""

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import damaged
from metaloom.storage.format.arrays import ARRAY_PATH, CRC_BYTES, ArraySpec, crc_of, read_metadata, sharding_codec
from metaloom.storage.format.files import Document, read_sealed, render, sealed
from metaloom.storage.format.records import SCHEMA, StageRecord, parse_session
from metaloom.storage.format.sessions import Head

FOLDER = "_segments"
SEAL = "seal.json"
RECORDS = "records.parquet"

_NAME = re.compile(r"([0-9]{8})-([0-9]{8})")
_FILE = re.compile(
    rf"{re.escape(RECORDS)}|tables/[a-z_]+\.parquet|data\.zarr/(([a-z0-9_]+|{ARRAY_PATH.pattern})/)?zarr\.json"
    rf"|data\.zarr/{ARRAY_PATH.pattern}/c(\.\d+)+"
)
MOST_RECORDS = 2**22
_ABSENT = 2**64 - 1


@dataclass(frozen=True)
class Link:
    """Sequence of consecutive records, each of which contains the hash of the one before it."""

    first: int  # position of the first record in the run's history
    previous: str  # hash before the first record
    head: Head  # the last record

    @classmethod
    def of(cls, record: StageRecord) -> "Link":
        return cls(record.sequence, record.previous, Head.of(record))


@dataclass(frozen=True)
class PackedArray:
    """Rows of an array in a segment, from row `first_row` on: one file if `sharded`, otherwise one file per row."""

    first_row: int
    rows: int
    sharded: bool


@dataclass(frozen=True)
class PackedFile:
    """Size in bytes and SHA-256 of a segment's file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """Contents of a segment."""

    iterations: range
    outputs: Mapping[tuple[str, int], tuple[range, ...]]  # iterations, keyed by stage and inner step
    links: tuple[Link, ...]  # links of the record chain, in order
    sessions: frozenset[tuple[int, str]]  # number and token of each session that wrote the records
    arrays: Mapping[str, PackedArray]
    files: Mapping[str, PackedFile]  # all files except the seal and separate chunks

    @classmethod
    def of(
        cls,
        iterations: range,
        records: Sequence[StageRecord],
        arrays: Mapping[str, PackedArray],
        files: Mapping[str, PackedFile],
    ) -> "Seal":
        held: dict[tuple[str, int], list[int]] = {}
        for record in records:
            held.setdefault((record.ref.stage, record.ref.step), []).append(record.ref.iteration)
        outputs = {output: (*ranges(numbers),) for output, numbers in sorted(held.items())}
        sessions = frozenset((record.session, record.token) for record in records)
        return cls(iterations, outputs, join(map(Link.of, records)), sessions, arrays, files)

    def holds(self, ref: StageRef) -> bool:
        return any(ref.iteration in part for part in self.outputs.get((ref.stage, ref.step), ()))

    def refs(self, iterations: Collection[int] | None = None) -> Iterator[StageRef]:
        """Yield references to the segment's outputs, for all or the given iterations."""
        for (stage, step), parts in self.outputs.items():
            found = chain(*parts) if iterations is None else (i for i in iterations if any(i in part for part in parts))
            yield from (StageRef(i, stage, step) for i in found)

    def content(self) -> bytes:
        document = {
            "schema": SCHEMA,
            "iterations": [self.iterations.start, self.iterations.stop],
            "outputs": [
                {"stage": stage, "step": step, "iterations": [[part.start, part.stop] for part in parts]}
                for (stage, step), parts in self.outputs.items()
            ],
            "links": [
                {"first": link.first, "previous": link.previous, "head": link.head.document()} for link in self.links
            ],
            "sessions": [[number, token] for number, token in sorted(self.sessions)],
            "arrays": {path: asdict(array) for path, array in self.arrays.items()},
            "files": {path: asdict(file) for path, file in self.files.items()},
        }
        return render(sealed(document))


def read_seal(folder: Path) -> Seal:
    """Read the seal in a segment's folder. Raises FileNotFoundError or DamagedRun."""
    document = read_sealed(folder / SEAL)
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"unexpected schema {document['schema']!r}")
        seal = Seal(
            iterations=_parse_range(document["iterations"]),
            outputs={
                (str(item["stage"]), int(item["step"])): tuple(_parse_range(part) for part in item["iterations"])
                for item in document["outputs"]
            },
            links=tuple(
                Link(int(link["first"]), str(link["previous"]), Head.parse(link["head"])) for link in document["links"]
            ),
            sessions=frozenset(parse_session(number, token) for number, token in document["sessions"]),
            arrays={
                str(path): PackedArray(int(array["first_row"]), int(array["rows"]), bool(array["sharded"]))
                for path, array in document["arrays"].items()
            },
            files={str(path): PackedFile(int(f["size"]), str(f["sha256"])) for path, f in document["files"].items()},
        )
        _check(seal)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder / SEAL, f"not the seal of a segment ({type(error).__name__}: {error})") from None
    if segment_name(seal.iterations) != folder.name:
        raise damaged(folder / SEAL, f"contains the seal of {segment_name(seal.iterations)}")
    return seal


def segment_name(iterations: range) -> str:
    return f"{iterations.start:08d}-{iterations.stop - 1:08d}"


def segment_iterations(name: str) -> range | None:
    """Return the iterations of a segment, given its folder name; None for other names."""
    match = _NAME.fullmatch(name)
    found = range(int(match[1]), int(match[2]) + 1) if match else None
    return found or None


def join(links: Iterable[Link]) -> tuple[Link, ...]:
    """Merge links that follow each other, and return the result in position order."""
    joined: list[Link] = []
    for link in sorted(links, key=lambda link: link.first):
        last = joined[-1] if joined else None
        if last is not None and (link.first, link.previous) == (last.head.sequence + 1, last.head.sha256):
            joined[-1] = Link(last.first, last.previous, link.head)
        else:
            joined.append(link)
    return tuple(joined)


def array_document(spec: ArraySpec, array: PackedArray) -> Document:
    """Return the zarr.json of an array in a segment, which plain zarr can read."""
    whole = spec.with_rows(array.rows).document()
    document = {**whole, "attributes": {**whole["attributes"], "first_row": array.first_row}}
    if array.sharded:
        row = whole["chunk_grid"]["configuration"]["chunk_shape"]
        document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [array.rows, *row[1:]]}}
        document["codecs"] = [sharding_codec(row, whole["codecs"])]
    return sealed(document, holder="attributes")


def spec_in_segment(file: Path, path: str, array: PackedArray, rows: int) -> ArraySpec:
    """Return the spec that an array has outside of segments, with `rows` rows, given its zarr.json in a segment."""
    document = read_metadata(file)
    attributes = {name: value for name, value in document["attributes"].items() if name not in ("sha256", "first_row")}
    shape, dims = document["shape"][1:], document["dimension_names"]
    sharded = not array.sharded and document["codecs"][0]["name"] == "sharding_indexed"
    return ArraySpec(path, rows, tuple(shape), document["data_type"], tuple(dims), attributes, sharded)


def shard_index(sizes: Sequence[int | None]) -> bytes:
    """Return the index at the end of a shard, given the sizes of its chunks (None for a missing chunk)."""
    places: list[int] = []
    offset = 0
    for size in sizes:
        places += (_ABSENT, _ABSENT) if size is None else (offset, size)
        offset += size or 0
    index = struct.pack(f"<{len(places)}Q", *places)
    return index + crc_of(index)


def index_size(rows: int) -> int:
    return 16 * rows + CRC_BYTES


def place_in_shard(index: bytes, row: int, where: Path) -> tuple[int, int] | None:
    """Return the offset and size of a row's chunk according to its shard's index; None if the chunk is missing."""
    if crc_of(index[:-CRC_BYTES]) != index[-CRC_BYTES:]:
        raise damaged(where, "its index does not match the index's CRC-32C")
    offset, size = struct.unpack_from("<2Q", index, 16 * row)
    return None if offset == _ABSENT else (offset, size)


def ranges(numbers: Iterable[int]) -> Iterator[range]:
    """Group integers into ranges of consecutive numbers."""
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        part = [number for _, number in group]
        yield range(part[0], part[-1] + 1)


def _check(seal: Seal) -> None:
    """Raise ValueError for an impossible seal, before its file names and sizes are used."""
    for (stage, step), parts in seal.outputs.items():
        for part in parts:
            StageRef(part.start, stage, step)
            if not seal.iterations.start <= part.start < part.stop <= seal.iterations.stop:
                raise ValueError(f"{stage} has iterations outside the segment, {part.start} to {part.stop - 1}")
    count = sum(len(part) for parts in seal.outputs.values() for part in parts)
    if count > MOST_RECORDS:
        raise ValueError(f"too many outputs: {count}")
    for path, array in seal.arrays.items():
        if not ARRAY_PATH.fullmatch(path) or array.first_row < 0 or array.rows < 1:
            raise ValueError(f"invalid rows of the array {path!r}: {array.rows} from row {array.first_row}")
    if wrong := [path for path in seal.files if not _FILE.fullmatch(path)]:
        raise ValueError(f"unexpected file name {wrong[0]!r}")
    if RECORDS not in seal.files:
        raise ValueError(f"{RECORDS} is not among the files")


def _parse_range(ends: Sequence[Any]) -> range:
    first, stop = (int(end) for end in ends)
    if not 0 <= first < stop <= 10**8:
        raise ValueError(f"invalid iterations: {first} up to but not including {stop}")
    return range(first, stop)
