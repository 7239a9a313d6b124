"""Sizes of batches for Dask, which takes what it does not know for 56 bytes. Importing this registers them.

Workers decide by these sizes when to spill and when to pause, so what they run imports this too.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
from dask.sizeof import sizeof

from metaloom.pipeline.types import EpisodeBatch, Samples, Step, TaskBatch, TaskParams, Update

_SENT = (TaskBatch, TaskParams, EpisodeBatch, Samples, Step, Update)


def num_bytes(value: object) -> int:
    """Return the bytes of all arrays in a batch, or of what is bytes already."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, tuple):
        return sum(map(num_bytes, value))
    if is_dataclass(value):
        return sum(num_bytes(getattr(value, each.name)) for each in fields(value))
    return 0


for _kind in _SENT:
    sizeof.register(_kind, num_bytes)
