"""Rows of large arrays in parts, one per task, so that one task is read and checked without the others.

A shard is what Zarr's sharding codec makes of a row, with a table of checksums before its index:

    parts | CRC-32C of every part, u4 | offset and size of every part, u8 | CRC-32C of the index, u4

The record commits the size of the file and the CRC-32C of table and index. The table is needed: a part of another shard
that has the same size passes every check of its own, and leaves the CRC-32C of the whole file as it was, because
bytes that end in their own CRC-32C all move a running one to the same place.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.types import Array
from metaloom.storage.errors import damaged
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.chunks import CRC_BYTES, check_chunk, crc32c, decode_chunk, encode_chunk
from metaloom.storage.format.files import Content, read_at

_TABLE_BYTES = 4
_INDEX_BYTES = 16


class Part(NamedTuple):
    """Where a part lies in its shard, and the CRC-32C of its bytes without the last four, which hold it."""

    offset: int
    size: int
    crc: int


def encode_shard(row: Array) -> tuple[Content, int]:
    """Encode a row as a shard with a part per entry of its first axis: its bytes, and what its record commits."""
    chunks = [encode_chunk(part, compressed=True) for part in row]
    sizes = np.array([sum(map(len, content)) for content, _ in chunks], "<u8")
    index = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1).tobytes()
    table = np.array([crc for _, crc in chunks], "<u4").tobytes()
    pieces = [piece for content, _ in chunks for piece in content]
    return (*pieces, table, index, _crc_of(index)), crc32c(table + index)


def read_parts(descriptor: int, spec: ArraySpec, where: Path, *, size: int, crc: int) -> list[Part]:
    """Read where the parts of a shard are.

    Args:
        descriptor: of the file.
        spec: of the array.
        where: path of the file.
        size: that was committed.
        crc: that was committed, of table and index.

    Raises:
        DamagedRun: the file has another size, or its table or index is not what was committed.
    """
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
    parts = [Part(offset, length, crc) for (offset, length), crc in zip(places, crcs, strict=True)]
    ends = [0, *(part.offset + part.size for part in parts)]
    if [*(part.offset for part in parts), size - tail] != ends:
        raise damaged(where, "its parts do not fill it")
    return parts


def check_parts(descriptor: int, parts: Iterable[Part], where: Path) -> None:
    """Compare parts with the table of their shard.

    Raises:
        DamagedRun: one is not what was committed.
    """
    for part in parts:
        _read_part(descriptor, part, where)


def decode_parts(descriptor: int, parts: Iterable[Part], spec: ArraySpec, where: Path) -> Array:
    """Read, check and decode parts: [number of parts, ...], writable.

    Raises:
        DamagedRun: one is not what was committed, or does not decode.
    """
    chosen, of_task = [*parts], spec.part
    rows = np.empty((len(chosen), *of_task.shape), spec.dtype)
    for part, row in zip(chosen, rows, strict=True):
        decode_chunk(_read_part(descriptor, part, where), of_task, where, row)
    return rows


def _read_part(descriptor: int, part: Part, where: Path) -> bytes:
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
