"""Zarr v3 arrays of a run: one array per quantity, with one chunk or shard per row.

Bytes and metadata are identical to what zarr-python writes, so plain `zarr.open` reads them. They are written here
because zarr-python takes several times as much CPU time, and because chunks must be checked against their commit
records before decoding.

A large row is a shard with a part per task, so that a task can be read and checked separately. A shard follows Zarr's
sharding codec, with a table of checksums before its index:

    parts | CRC-32C of every part, u4 | offset and size of every part, u8 | CRC-32C of the index, u4

The record commits the file's size and the CRC-32C of table and index. Without the table, replacing a part with one of
the same size from another shard would not change the CRC-32C of the whole file, because any bytes followed by their
CRC-32C bring a running CRC to the same value.
"""

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import google_crc32c
import numpy as np

from metaloom.pipeline.outputs import DTYPES
from metaloom.pipeline.types import Array
from metaloom.storage.errors import IncompatibleFormat, damaged
from metaloom.storage.format.codec import Piece, dtype_name
from metaloom.storage.format.files import Content, read_sealed, sealed
from metaloom.storage.format.stages import dims_of

COMPRESS_FROM = 64 * 2**10
"""Minimum raw bytes for a row to be compressed, and to become a shard if it has several tasks."""

SMALLEST_PART = 2**10  # minimum raw bytes per task for a shard, because each part has 40 bytes of overhead

ARRAY_PATH = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_][A-Za-z0-9_.\-]*")  # pattern of an array's path below `data.zarr`

_COMPRESS_TO = 2**31 - 1  # blosc 1 stores sizes in 31 bits


@dataclass(frozen=True)
class ArraySpec:
    """Metadata of one array."""

    path: str
    rows: int  # capacity
    shape: tuple[int, ...]  # shape of one row
    dtype: str
    dims: tuple[str, ...]  # names of all axes, including the leading one
    attributes: Mapping[str, Any]
    sharded: bool = False  # each row is a shard with one part per task

    @classmethod
    def of(cls, piece: Piece, rows: int, *, shards: bool) -> "ArraySpec":
        """Return the spec of the array that stores a piece. Runs in format metaloom/1 have no shards."""
        plan, shape = piece.plan, piece.data.shape
        about = {"unit": plan.unit, "description": plan.description} if plan else {}
        dims = dims_of(piece.path, plan, len(shape))
        plain = cls(piece.path, rows, shape, dtype_name(piece.data), dims, {**about, **piece.attributes})
        large = shards and dims[1:2] == ("task",) and shape[0] > 1 and plain.raw_bytes >= COMPRESS_FROM
        return replace(plain, sharded=large and SMALLEST_PART <= plain.part.raw_bytes <= _COMPRESS_TO)

    @cached_property
    def part(self) -> "ArraySpec":
        """Spec of one task's part of a row, which is always compressed."""
        return replace(self, shape=self.shape[1:], dims=self.dims[1:], sharded=True)

    @cached_property
    def raw_bytes(self) -> int:
        """Size of one row in bytes before compression."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def compressed(self) -> bool:
        """True if chunks or shard parts are compressed."""
        return self.sharded or COMPRESS_FROM <= self.raw_bytes <= _COMPRESS_TO

    def chunk_key(self, row: int) -> str:
        """Return the path of a row's chunk below `data.zarr`."""
        return f"{self.path}/c.{row}" + ".0" * len(self.shape)

    def with_rows(self, rows: int) -> "ArraySpec":
        return replace(self, rows=rows)

    def document(self) -> dict[str, Any]:
        itemsize = np.dtype(self.dtype).itemsize
        blosc = {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": itemsize}
        compressor = [{"name": "blosc", "configuration": blosc}] if self.compressed else []
        codecs = [_bytes_codec(itemsize), *compressor, _CRC_CODEC]
        if self.sharded:
            codecs = [sharding_codec([1, 1, *(max(1, size) for size in self.shape[1:])], codecs)]
        return sealed(
            {
                "attributes": dict(self.attributes),
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [1, *(max(1, size) for size in self.shape)]},
                },
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "codecs": codecs,
                "data_type": self.dtype,
                "dimension_names": list(self.dims),
                "fill_value": False if self.dtype == "bool" else "NaN" if self.dtype.startswith("float") else 0,
                "node_type": "array",
                "shape": [self.rows, *self.shape],
                "storage_transformers": [],
                "zarr_format": 3,
            },
            holder="attributes",
        )


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return sealed({"attributes": dict(attributes), "node_type": "group", "zarr_format": 3}, holder="attributes")


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a zarr.json and verify its checksum."""
    return read_sealed(path, indented=True, holder="attributes")


def read_spec(data: Path, path: str) -> ArraySpec:
    """Read the spec of the array at a path below `data`.

    Only metadata that this store could have written is accepted, because an unexpected dtype or codec could run code.
    Raises FileNotFoundError if there is no such array, DamagedRun if its metadata is damaged, and IncompatibleFormat if
    the metadata is intact but describes an array that this store does not write.
    """
    file = data / path / "zarr.json"
    document = read_metadata(file)
    spec = _parse_spec(document, path)
    if spec is None or spec.document() != document:
        raise IncompatibleFormat(
            file,
            found="an array that this version does not write",
            required=f"codecs bytes, blosc (lz4, shuffle), crc32c and a dtype of {', '.join(DTYPES)}",
            action="Read it with plain zarr if you trust its source",
        )
    return spec


_CRC_CODEC: dict[str, Any] = {"name": "crc32c"}


def sharding_codec(chunk_shape: list[int], codecs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata of a codec for shards whose chunks have this shape and are encoded with these codecs."""
    index_codecs = [_bytes_codec(8), _CRC_CODEC]
    about = {"chunk_shape": chunk_shape, "codecs": codecs, "index_codecs": index_codecs, "index_location": "end"}
    return {"name": "sharding_indexed", "configuration": about}


def _bytes_codec(itemsize: int) -> dict[str, Any]:
    return {"name": "bytes"} | ({"configuration": {"endian": "little"}} if itemsize > 1 else {})


def _parse_spec(document: Mapping[str, Any], path: str) -> ArraySpec | None:
    try:
        rows, *shape = (int(size) for size in document["shape"])
        dtype, dims = str(document["data_type"]), tuple(str(name) for name in document["dimension_names"])
        attributes = {name: value for name, value in document["attributes"].items() if name != "sha256"}
        sharded = document["codecs"][0]["name"] == "sharding_indexed"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    if dtype not in DTYPES or min(rows, *shape, 0) < 0 or len(dims) != len(shape) + 1:
        return None
    if sharded and not (len(shape) > 1 and shape[0]):
        return None
    return ArraySpec(path, rows, tuple(shape), dtype, dims, attributes, sharded)


_LARGEST_RATIO = 300  # lz4 cannot expand a byte to more than 255
CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # CRC-32C of any bytes followed by their own CRC-32C
_BLOSC_HEADER = struct.Struct("<4xIII")


class _Blosc(Protocol):
    def compress(self, source: Array, cname: bytes, clevel: int, shuffle: int) -> bytes: ...
    def decompress(self, source: bytes, dest: Array) -> object: ...


@cache
def _blosc() -> _Blosc:
    # Imported on first use, because the import takes 0.04 s, a tenth of the time to list runs.
    import numcodecs.blosc

    # Blosc's threads write blocks in the order in which they finish, so the same array could be stored as different
    # bytes each time.
    numcodecs.blosc.use_threads = False
    # Call the functions directly, because a codec object's overhead doubles the time for a small part. They are
    # untyped.
    return cast(_Blosc, numcodecs.blosc)


def encode_chunk(data: Array, *, compressed: bool) -> tuple[Content, int]:
    """Encode a row as a chunk; return its bytes and the CRC-32C of all but the last four, which store this CRC."""
    raw = np.ascontiguousarray(data).reshape(-1)
    payload = _blosc().compress(raw, b"lz4", 5, 1) if compressed else raw.tobytes()
    crc = crc32c(payload)
    # Not joined, because copying every batch would add a tenth to the cost of storing it.
    return (payload, crc.to_bytes(CRC_BYTES, "little")), crc


def check_chunk(raw: bytes, where: Path, *, size: int, crc: int) -> None:
    """Raise DamagedRun unless a chunk matches its commit record."""
    if len(raw) != size:
        raise damaged(where, f"holds {len(raw)} bytes, but {size} were committed")
    # The CRC of the whole chunk only checks that the last four bytes match the rest, so compare them too.
    if crc32c(raw) != _CRC_RESIDUE or raw[-CRC_BYTES:] != crc.to_bytes(CRC_BYTES, "little"):
        raise damaged(where, "its CRC-32C differs from the committed one")


def decode_chunk(raw: bytes, spec: ArraySpec, where: Path, out: Array | None = None) -> Array:
    """Decode a checked chunk into a writable row, or into `out` if it is given and the chunk is compressed."""
    if not spec.compressed:
        payload = memoryview(raw)[:-CRC_BYTES]
        if len(payload) != spec.raw_bytes:
            raise damaged(where, f"holds {len(payload)} bytes of data; a row of {spec.path} has {spec.raw_bytes}")
        return np.frombuffer(payload, spec.dtype).reshape(spec.shape).copy()
    # blosc trusts its header: a wrong size would write past the row or exhaust memory.
    if len(raw) < 16 + CRC_BYTES:
        raise damaged(where, "too short for a compressed chunk")
    raw_bytes, block, compressed = _BLOSC_HEADER.unpack_from(raw)
    fits = raw_bytes == spec.raw_bytes and compressed == len(raw) - CRC_BYTES and 0 < block <= raw_bytes
    if not fits or raw_bytes > _LARGEST_RATIO * compressed:
        raise damaged(where, f"its compression header does not describe a row of {spec.path} ({spec.raw_bytes} bytes)")
    row = np.empty(spec.shape, spec.dtype) if out is None else out
    try:
        # Blosc reads only the bytes that its header specifies, so the checksum need not be removed.
        _blosc().decompress(raw, row)
    except (RuntimeError, ValueError) as error:
        raise damaged(where, f"does not decompress ({error})") from None
    return row


def largest_chunk(spec: ArraySpec) -> int:
    """Return the maximum size of a chunk of the array in bytes."""
    return spec.raw_bytes + 1024


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes, as in Zarr's crc32c codec."""
    return cast(int, google_crc32c.value(data))


_TABLE_BYTES = 4
_INDEX_BYTES = 16


class ShardPart(NamedTuple):
    """Location of a part in its shard, and the CRC-32C of all but its last four bytes, which store this CRC."""

    offset: int
    size: int
    crc: int


def encode_shard(row: Array) -> tuple[Content, int]:
    """Encode a row as a shard with a part per entry on its first axis; return the bytes and the committed CRC-32C."""
    chunks = [encode_chunk(part, compressed=True) for part in row]
    sizes = np.array([sum(map(len, content)) for content, _ in chunks], "<u8")
    index = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1).tobytes()
    table = np.array([crc for _, crc in chunks], "<u4").tobytes()
    pieces = [piece for content, _ in chunks for piece in content]
    return (*pieces, table, index, crc_of(index)), crc32c(table + index)


def read_parts(descriptor: int, spec: ArraySpec, where: Path, *, size: int, crc: int) -> list[ShardPart]:
    """Read the locations of a shard's parts, after checking the shard's size and CRC-32C."""
    count = spec.shape[0]
    tail = count * (_TABLE_BYTES + _INDEX_BYTES) + CRC_BYTES
    if (found := os.fstat(descriptor).st_size) != size:
        raise damaged(where, f"holds {found} bytes, but {size} were committed")
    raw = pread(descriptor, tail, size - tail, where)
    index = raw[count * _TABLE_BYTES : -CRC_BYTES]
    if crc32c(raw[:-CRC_BYTES]) != crc or raw[-CRC_BYTES:] != crc_of(index):
        raise damaged(where, "its table of parts differs from the committed one")
    crcs = np.frombuffer(raw, "<u4", count).tolist()
    places = np.frombuffer(index, "<u8").reshape(count, 2).tolist()
    parts = [ShardPart(offset, length, crc) for (offset, length), crc in zip(places, crcs, strict=True)]
    ends = [0, *(part.offset + part.size for part in parts)]
    if [*(part.offset for part in parts), size - tail] != ends:
        raise damaged(where, "its parts do not fill it")
    return parts


def check_parts(descriptor: int, parts: Iterable[ShardPart], where: Path) -> None:
    """Raise DamagedRun unless the parts match their shard's table."""
    for part in parts:
        _read_part(descriptor, part, where)


def decode_parts(descriptor: int, parts: Iterable[ShardPart], spec: ArraySpec, where: Path) -> Array:
    """Read, check and decode parts into a writable array, [number of parts, ...]."""
    chosen, of_task = [*parts], spec.part
    rows = np.empty((len(chosen), *of_task.shape), spec.dtype)
    for part, row in zip(chosen, rows, strict=True):
        decode_chunk(_read_part(descriptor, part, where), of_task, where, row)
    return rows


def _read_part(descriptor: int, part: ShardPart, where: Path) -> bytes:
    raw = pread(descriptor, part.size, part.offset, where)
    check_chunk(raw, where, size=part.size, crc=part.crc)
    return raw


def pread(descriptor: int, size: int, offset: int, where: Path) -> bytes:
    """Read part of an open file. Raises DamagedRun if the system rejects the read or the offset is negative."""
    if offset < 0:
        raise damaged(where, "too short for a shard of its array")
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:
        raise damaged(where, error.strerror or "cannot be read") from error


def crc_of(data: bytes) -> bytes:
    return crc32c(data).to_bytes(CRC_BYTES, "little")
