"""Digests of stage outputs, by which runs, replays and machines are compared."""

import hashlib
from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.types import Array, LearnerState
from metaloom.storage.format.codec import Value, dtype_name, flatten
from metaloom.storage.format.records import ArrayDigest


def digest(value: Value | LearnerState) -> dict[str, str]:
    """SHA-256 of every array of a value by name, in the order of the names."""
    return {name: entry.sha256 for name, entry in array_digests(value).items()}


def output_digest(digests: Mapping[str, str]) -> str:
    """Combine the digests of all arrays of a value into one, from what `digest` returns."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def array_digests(value: Value | LearnerState) -> dict[str, ArrayDigest]:
    """Digest, dtype and shape of every array of a value, in the order of the names."""
    flat = flatten(value)
    return {name: ArrayDigest(_sha256(flat[name]), dtype_name(flat[name]), flat[name].shape) for name in sorted(flat)}


def _sha256(array: Array) -> str:
    # Dtype and shape go in first: the same bytes under another shape are another array.
    state = hashlib.sha256(f"{array.dtype.str}{list(array.shape)}\n".encode())
    state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()
