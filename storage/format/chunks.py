"""Encoding of array rows as chunks and shards, and checks before decoding.

A row is a chunk or, if large, a shard with a part per task, so that a task can be read and checked separately. A shard
follows Zarr's sharding codec, with a table of checksums before its index:

    parts | CRC-32C of every part, u4 | offset and size of every part, u8 | CRC-32C of the index, u4

The record commits the size of the file and the CRC-32C of table and index. The table is needed: replacing a part by one
of the same size from another shard would not change the CRC-32C of the whole file, since any bytes followed by their
CRC-32C move a running CRC to the same value.
"""

import os
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import google_crc32c
import numpy as np

from metaloom.pipeline.types import Array
from metaloom.storage.errors import damaged
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.files import Content, read_at

_LARGEST_RATIO = 300  # lz4 cannot expand a byte to more than 255
CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # CRC-32C of any bytes followed by their own CRC-32C
_BLOSC_HEADER = struct.Struct("<4xIII")


class _Blosc(Protocol):
    def compress(self, source: Array, cname: bytes, clevel: int, shuffle: int) -> bytes: ...
    def decompress(self, source: bytes, dest: Array) -> object: ...


@cache
def _blosc() -> _Blosc:
    # Imported on first use: it takes 0.04 s, a tenth of the time for listing runs.
    import numcodecs.blosc

    # Blosc's threads write blocks in the order in which they finish, so the same array would be stored with other bytes
    # the next time.
    numcodecs.blosc.use_threads = False
    # Use its functions, since the overhead of a codec object doubles the time for a small part. They are
    # not typed.
    return cast(_Blosc, numcodecs.blosc)


def encode_chunk(data: Array, *, compressed: bool) -> tuple[Content, int]:
    """Encode a row as a chunk; return its bytes, and their CRC-32C without the last four, which hold it."""
    raw = np.ascontiguousarray(data).reshape(-1)
    payload = _blosc().compress(raw, b"lz4", 5, 1) if compressed else raw.tobytes()
    crc = crc32c(payload)
    # Not joined: copying every batch would add a tenth to the cost of storing it.
    return (payload, crc.to_bytes(CRC_BYTES, "little")), crc


def check_chunk(raw: bytes, where: Path, *, size: int, crc: int) -> None:
    """Compare a chunk with its commit record."""
    if len(raw) != size:
        raise damaged(where, f"holds {len(raw)} bytes, {size} were committed")
    # The CRC of the whole only checks that the last four bytes match the rest; these distinguish chunks.
    if crc32c(raw) != _CRC_RESIDUE or raw[-CRC_BYTES:] != crc.to_bytes(CRC_BYTES, "little"):
        raise damaged(where, "its CRC-32C is not the committed one")


def decode_chunk(raw: bytes, spec: ArraySpec, where: Path, out: Array | None = None) -> Array:
    """Decode a checked chunk to a writable row; decompress into `out` if given."""
    if not spec.compressed:
        payload = memoryview(raw)[:-CRC_BYTES]
        if len(payload) != spec.raw_bytes:
            raise damaged(where, f"holds {len(payload)} bytes of data; a row of {spec.path} has {spec.raw_bytes}")
        return np.frombuffer(payload, spec.dtype).reshape(spec.shape).copy()
    # blosc trusts its header: a wrong size would write past the row or exhaust memory.
    if len(raw) < 16 + CRC_BYTES:
        raise damaged(where, "is too short for a compressed chunk")
    raw_bytes, block, compressed = _BLOSC_HEADER.unpack_from(raw)
    fits = raw_bytes == spec.raw_bytes and compressed == len(raw) - CRC_BYTES and 0 < block <= raw_bytes
    if not fits or raw_bytes > _LARGEST_RATIO * compressed:
        raise damaged(where, f"its compression header does not describe a row of {spec.path} ({spec.raw_bytes} bytes)")
    row = np.empty(spec.shape, spec.dtype) if out is None else out
    try:
        # Blosc reads only the bytes that its header states, so the checksum need not be removed.
        _blosc().decompress(raw, row)
    except (RuntimeError, ValueError) as error:
        raise damaged(where, f"does not decompress ({error})") from None
    return row


def largest_chunk(spec: ArraySpec) -> int:
    """Return the maximum size of a chunk of the array."""
    return spec.raw_bytes + 1024


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli), as in Zarr's crc32c codec."""
    return cast(int, google_crc32c.value(data))


_TABLE_BYTES = 4
_INDEX_BYTES = 16


class ShardPart(NamedTuple):
    """Location of a part in its shard, and its CRC-32C without the last four bytes, which hold it."""

    offset: int
    size: int
    crc: int


def encode_shard(row: Array) -> tuple[Content, int]:
    """Encode a row as a shard with a part per entry of its first axis; return its bytes and the committed CRC-32C."""
    chunks = [encode_chunk(part, compressed=True) for part in row]
    sizes = np.array([sum(map(len, content)) for content, _ in chunks], "<u8")
    index = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1).tobytes()
    table = np.array([crc for _, crc in chunks], "<u4").tobytes()
    pieces = [piece for content, _ in chunks for piece in content]
    return (*pieces, table, index, _crc_of(index)), crc32c(table + index)


def read_parts(descriptor: int, spec: ArraySpec, where: Path, *, size: int, crc: int) -> list[ShardPart]:
    """Read the locations of a shard's parts, after checking the committed size and CRC-32C."""
    count = spec.shape[0]
    tail = count * (_TABLE_BYTES + _INDEX_BYTES) + CRC_BYTES
    if (found := os.fstat(descriptor).st_size) != size:
        raise damaged(where, f"holds {found} bytes, {size} were committed")
    raw = _pread(descriptor, tail, size - tail, where)
    index = raw[count * _TABLE_BYTES : -CRC_BYTES]
    if crc32c(raw[:-CRC_BYTES]) != crc or raw[-CRC_BYTES:] != _crc_of(index):
        raise damaged(where, "its table of parts is not the committed one")
    crcs = np.frombuffer(raw, "<u4", count).tolist()
    places = np.frombuffer(index, "<u8").reshape(count, 2).tolist()
    parts = [ShardPart(offset, length, crc) for (offset, length), crc in zip(places, crcs, strict=True)]
    ends = [0, *(part.offset + part.size for part in parts)]
    if [*(part.offset for part in parts), size - tail] != ends:
        raise damaged(where, "its parts do not fill it")
    return parts


def check_parts(descriptor: int, parts: Iterable[ShardPart], where: Path) -> None:
    """Compare parts with the table of their shard.

    Raises:
        DamagedRun: a part is not the committed one.
    """
    for part in parts:
        _read_part(descriptor, part, where)


def decode_parts(descriptor: int, parts: Iterable[ShardPart], spec: ArraySpec, where: Path) -> Array:
    """Read, check and decode parts to a writable array [number of parts, ...].

    Raises:
        DamagedRun: a part is not the committed one, or cannot be decoded.
    """
    chosen, of_task = [*parts], spec.part
    rows = np.empty((len(chosen), *of_task.shape), spec.dtype)
    for part, row in zip(chosen, rows, strict=True):
        decode_chunk(_read_part(descriptor, part, where), of_task, where, row)
    return rows


def _read_part(descriptor: int, part: ShardPart, where: Path) -> bytes:
    raw = _pread(descriptor, part.size, part.offset, where)
    check_chunk(raw, where, size=part.size, crc=part.crc)
    return raw


def _pread(descriptor: int, size: int, offset: int, where: Path) -> bytes:
    if offset < 0:
        raise damaged(where, "is too short for a shard of its array")
    try:
        return read_at(descriptor, size, offset)
    except OSError as error:
        raise damaged(where, error.strerror or "cannot be read") from error


def _crc_of(data: bytes) -> bytes:
    return crc32c(data).to_bytes(CRC_BYTES, "little")
