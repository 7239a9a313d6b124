"""Chunks as bytes: what goes to the disk, and what is let near a decoder."""

import struct
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import google_crc32c
import numpy as np

from metaloom.pipeline.types import Array
from metaloom.storage.errors import damaged
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.files import Content

_LARGEST_RATIO = 300  # lz4 cannot expand a byte to more than 255
CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # CRC-32C of any bytes followed by their own CRC-32C
_BLOSC_HEADER = struct.Struct("<4xIII")


class _Blosc(Protocol):
    def compress(self, source: Array, cname: bytes, clevel: int, shuffle: int) -> bytes: ...
    def decompress(self, source: bytes, dest: Array) -> object: ...


@cache
def _blosc() -> _Blosc:
    # Imported on first use: it takes 0.04 s, a tenth of what listing runs does.
    import numcodecs.blosc

    # Blosc's own threads, which numcodecs uses in the main thread alone, write blocks as they finish: the same array
    # would have other bytes the next time, and a thinned one could not come back as it was.
    numcodecs.blosc.use_threads = False
    # Its functions, because what a codec object does around them takes as long as they do on a small part. They are
    # not typed.
    return cast(_Blosc, numcodecs.blosc)


def encode_chunk(data: Array, *, compressed: bool) -> tuple[Content, int]:
    """Encode a row as a chunk: its bytes, and the CRC-32C of all but their last four (which hold it)."""
    raw = np.ascontiguousarray(data).reshape(-1)
    payload = _blosc().compress(raw, b"lz4", 5, 1) if compressed else raw.tobytes()
    crc = crc32c(payload)
    # Not joined: a copy of every batch is a tenth of what storing it costs.
    return (payload, crc.to_bytes(CRC_BYTES, "little")), crc


def check_chunk(raw: bytes, where: Path, *, size: int, crc: int) -> None:
    """Compare a chunk with its commit record.

    Raises:
        DamagedRun: it is not what was committed.
    """
    if len(raw) != size:
        raise damaged(where, f"holds {len(raw)} bytes, {size} were committed")
    # The checksum of all bytes only says that the last four belong to the rest; those tell one chunk from another.
    if crc32c(raw) != _CRC_RESIDUE or raw[-CRC_BYTES:] != crc.to_bytes(CRC_BYTES, "little"):
        raise damaged(where, "its CRC-32C is not the committed one")


def decode_chunk(raw: bytes, spec: ArraySpec, where: Path, out: Array | None = None) -> Array:
    """Decode the row that a checked chunk holds, writable; a compressed one into `out` if that is given.

    Raises:
        DamagedRun: the chunk does not decode to a row of the array.
    """
    if not spec.compressed:
        payload = memoryview(raw)[:-CRC_BYTES]
        if len(payload) != spec.raw_bytes:
            raise damaged(where, f"holds {len(payload)} bytes of data; a row of {spec.path} has {spec.raw_bytes}")
        return np.frombuffer(payload, spec.dtype).reshape(spec.shape).copy()
    _check_blosc_header(raw, spec, where)
    row = np.empty(spec.shape, spec.dtype) if out is None else out
    try:
        # Blosc takes as much as its header says, so the checksum behind it need not be cut off.
        _blosc().decompress(raw, row)
    except (RuntimeError, ValueError) as error:
        raise damaged(where, f"does not decompress ({error})") from None
    return row


def largest_chunk(spec: ArraySpec) -> int:
    """Largest size that a chunk of the array can have."""
    return spec.raw_bytes + 1024


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), the checksum of Zarr's crc32c codec."""
    return cast(int, google_crc32c.value(data))


def _check_blosc_header(raw: bytes, spec: ArraySpec, where: Path) -> None:
    # blosc trusts its header: a wrong size there would write past the row, a huge one would exhaust memory.
    if len(raw) < 16 + CRC_BYTES:
        raise damaged(where, "is too short for a compressed chunk")
    raw_bytes, block, compressed = _BLOSC_HEADER.unpack_from(raw)
    fits = raw_bytes == spec.raw_bytes and compressed == len(raw) - CRC_BYTES and 0 < block <= raw_bytes
    if not fits or raw_bytes > _LARGEST_RATIO * compressed:
        raise damaged(where, f"its compression header does not describe a row of {spec.path} ({spec.raw_bytes} bytes)")
