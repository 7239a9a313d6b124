"""Conversion between NumPy arrays and Arrow columns, without copies where possible."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from metaloom.pipeline.types import Array


def column(values: Array) -> pa.Array:
    """Convert an array to an Arrow array: scalars for shape [n], fixed-size lists for shape [n, ...]."""
    if values.ndim == 1:
        return _flat(values)
    kind = column_type(values.dtype, int(np.prod(values.shape[1:])))
    # FixedSizeListArray.from_arrays divides by the size, which may be zero.
    return pa.Array.from_buffers(kind, len(values), [None], children=[_flat(values.reshape(-1))])


def to_numpy(column: pa.ChunkedArray) -> Array:
    """Convert a scalar column without nulls to an array, [n]."""
    # Not `column.to_numpy()`, which imports pandas and adds half a second to every `metaloom ls`.
    if pa.types.is_boolean(column.type):
        return to_numpy(column.cast(pa.uint8())).astype(np.bool_)
    return np.from_dlpack(column.combine_chunks())


def text_column(texts: Sequence[str]) -> pa.Array:
    raw = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, raw)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(raw), pa.py_buffer(ends), pa.py_buffer(b"".join(raw)))


def column_type(dtype: np.dtype, size: int | None = None) -> pa.DataType:
    """Return the Arrow type of a scalar column, or of a column of lists with `size` entries."""
    number = pa.from_numpy_dtype(dtype)
    return number if size is None else pa.list_(pa.field("item", number, nullable=False), size)


def _flat(values: Array) -> pa.Array:
    # Not pa.array(values), which imports pandas and takes half a second and 50 MB.
    bits = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(bits)])
