"""Zarr v3 arrays of a run: one array per quantity, with one chunk or shard per row.

Chunk bytes and metadata are what zarr-python itself would write for the same array, so plain `zarr.open` reads them.
They are written here because zarr-python takes several times as much CPU, and because chunks must be checked against
their commit records before decoding.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.pipeline.outputs import DTYPES
from metaloom.storage.errors import IncompatibleFormat
from metaloom.storage.format.canonical import read_sealed, render, sealed
from metaloom.storage.format.codec import Piece, dtype_name
from metaloom.storage.format.layout import dims_of

COMPRESS_FROM = 64 * 2**10
"""Chunks of at least this number of raw bytes are compressed; rows of several tasks become shards."""

SMALLEST_PART = 2**10
"""Minimum raw bytes per task for a shard: a part has 40 bytes of overhead."""

ARRAY_PATH = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_][A-Za-z0-9_.\-]*")
"""Pattern of an array's path below `data.zarr`."""

_COMPRESS_TO = 2**31 - 1  # blosc 1 stores sizes in 31 bits


@dataclass(frozen=True)
class ArraySpec:
    """Metadata of one array.

    Attributes:
        path: Path below `data.zarr`.
        rows: Length of the leading axis (the capacity).
        shape: Shape of one row.
        dtype: Name of the dtype.
        dims: Names of the axes, including the leading one.
        attributes: Unit, description and the codec's own attributes.
        sharded: True if each row is a shard with one part per task.
    """

    path: str
    rows: int
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    attributes: Mapping[str, Any]
    sharded: bool = False

    @classmethod
    def of(cls, piece: Piece, rows: int, *, shards: bool) -> "ArraySpec":
        """Build the spec of the array that holds a piece. Runs in format metaloom/1 have no shards."""
        plan, shape = piece.plan, piece.data.shape
        about = {"unit": plan.unit, "description": plan.description} if plan else {}
        dims = dims_of(piece.path, plan, len(shape))
        plain = cls(piece.path, rows, shape, dtype_name(piece.data), dims, {**about, **piece.attributes})
        large = shards and dims[1:2] == ("task",) and shape[0] > 1 and plain.raw_bytes >= COMPRESS_FROM
        return replace(plain, sharded=large and SMALLEST_PART <= plain.part.raw_bytes <= _COMPRESS_TO)

    @cached_property
    def part(self) -> "ArraySpec":
        """Return the spec of one task's part of a row, which is always compressed."""
        return replace(self, shape=self.shape[1:], dims=self.dims[1:], sharded=True)

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of one row before compression."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def compressed(self) -> bool:
        """True if chunks or parts of shards are compressed."""
        return self.sharded or COMPRESS_FROM <= self.raw_bytes <= _COMPRESS_TO

    def chunk_key(self, row: int) -> str:
        """Return the path of a row's chunk below `data.zarr`."""
        return f"{self.path}/c.{row}" + ".0" * len(self.shape)

    def with_rows(self, rows: int) -> "ArraySpec":
        """Return the spec with another capacity."""
        return replace(self, rows=rows)

    def document(self) -> dict[str, Any]:
        """Return the content of the array's zarr.json."""
        itemsize = np.dtype(self.dtype).itemsize
        blosc = {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": itemsize}
        compressor = [{"name": "blosc", "configuration": blosc}] if self.compressed else []
        codecs = [_bytes_codec(itemsize), *compressor, _CRC_CODEC]
        if self.sharded:
            sharding = {
                "chunk_shape": [1, 1, *(max(1, size) for size in self.shape[1:])],
                "codecs": codecs,
                "index_codecs": [_bytes_codec(8), _CRC_CODEC],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
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
    """Return the content of a group's zarr.json."""
    return sealed({"attributes": dict(attributes), "node_type": "group", "zarr_format": 3}, holder="attributes")


def render_metadata(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a zarr.json."""
    return render(document, indented=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a zarr.json and verify its checksum."""
    return read_sealed(path, indented=True, holder="attributes")


def read_spec(data: Path, path: str) -> ArraySpec:
    """Read the array at a path below `data`.

    Only metadata that this store could have written is accepted: a foreign dtype or codec could execute code.

    Raises:
        FileNotFoundError: there is no such array.
        DamagedRun: its metadata is damaged.
        IncompatibleFormat: it is intact but describes an array that this store does not write.
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
