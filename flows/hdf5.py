"""Many small groups of arrays in one HDF5 file. Needs h5py, which comes with the extra `minari`."""
# h5py's low-level modules are compiled and have no types.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from metaloom.pipeline.types import Array

_LARGEST_COMPACT = 60_000
"""Bytes of an array that fit into the header of its dataset, which HDF5 limits to 64 kB."""

_MOST_ATTRIBUTES = 1000


class GroupWriter:
    """Writes groups of arrays and numbers, a context manager; by h5py's low-level calls, since it is all that costs.

    Args:
        path: of the new file; HDF5 1.10 and newer reads it.
    """

    def __init__(self, path: Path) -> None:
        self._file = h5py.File(path, "w", libver=("v108", "v110"))
        self._group = h5p.create(h5p.GROUP_CREATE)
        # Beyond eight attributes HDF5 would make an index of them, which is larger than they are.
        self._group.set_attr_phase_change(_MOST_ATTRIBUTES, 0)
        self._group.set_obj_track_times(False)

    def write(self, name: str, arrays: Mapping[str, Array], attributes: Mapping[str, float]) -> None:
        """Write a group."""
        group = h5g.create(self._file.id, name.encode(), None, self._group)
        for key, value in attributes.items():
            number = np.asarray(value)
            kind = _type_of(number.dtype)
            h5a.create(group, key.encode(), kind, _space_of(())).write(number, kind)
        for key, array in arrays.items():
            values = np.ascontiguousarray(array)
            kind = _type_of(values.dtype)
            layout = _layout(values.nbytes <= _LARGEST_COMPACT)
            h5d.create(group, key.encode(), kind, _space_of(values.shape), layout).write(h5s.ALL, h5s.ALL, values, kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@cache
def _layout(compact: bool) -> Any:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.COMPACT if compact else h5d.CONTIGUOUS)
    layout.set_obj_track_times(False)  # the same run gives the same file
    return layout


@cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    return h5t.py_create(dtype, logical=True)


@cache
def _space_of(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
