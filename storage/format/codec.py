"""Conversion of batches to stored arrays and back, and their digests.

`flatten` returns the arrays as users see them (one per parameter or metric), for digests and comparisons. `encode`
packs each mapping of parameters into one array per dtype, because Zarr's overhead is per array.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import accumulate
from typing import Any, ClassVar, Protocol, cast, get_origin

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.outputs import DTYPES
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Minibatches,
    Params,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.storage.errors import LayoutMismatch
from metaloom.storage.format.records import ArrayDigest
from metaloom.storage.format.stages import METRICS, METRICS_GROUP, ArrayPlan, StageTable, StoredStage, plan_in


class Value(Protocol):
    """Output of a stage: a frozen dataclass of arrays, built-in or described by a schema."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Stored = Mapping[str, tuple[Array, Mapping[str, Any]]]
"""Content of one group: the array and its attributes, keyed by array name."""

_DTYPE_NAMES = {np.dtype(name): name for name in DTYPES}
_LEARNER_FIELDS = ("params", "optimizer", "extra")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (TaskBatch, EpisodeBatch, Samples, TaskParams, Minibatches, Update, Evaluation)
}
"""Built-in output types, keyed by name."""
_DESCRIBED: Mapping[type[Any], str] = {TaskBatch: "params", Evaluation: "task_params"}
"""Names of the arrays whose attributes store the names and units of task fields, keyed by output type."""


@dataclass(frozen=True)
class Piece:
    """One row of one stored array."""

    path: str  # relative to `data.zarr`
    row: int  # index on the leading axis, which `data` lacks
    data: Array
    plan: ArrayPlan | None
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the same for all rows of the array


def flatten(value: Value | LearnerState) -> dict[str, Array]:
    """Return a value's arrays, keyed by name; nested names are joined with dots."""
    flat: dict[str, Array] = {}
    for f in fields(value):
        part = getattr(value, f.name)
        if isinstance(part, Mapping):
            named = cast(Mapping[str, Any], part)
            flat |= {f"{f.name}.{name}": np.asarray(entry) for name, entry in named.items()}
        elif isinstance(part, LearnerState):
            flat |= {f"{f.name}.{name}": entry for name, entry in flatten(part).items()}
        elif isinstance(part, np.ndarray):
            flat[f.name] = cast(Array, part)
    return flat


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype, cached because numpy takes 20 microseconds to compute it."""
    return _DTYPE_NAMES.get(array.dtype) or str(array.dtype)


def encode(stages: StageTable, ref: StageRef, value: Value) -> list[Piece]:
    """Encode a stage's output as rows of stored arrays. Raises LayoutMismatch if it cannot be stored."""
    stage = stages[ref.stage]
    if stage.schema is not None:
        if problem := stage.schema.problem_of(value):
            raise _mismatch(ref, *problem.split("; expected "))
    elif not isinstance(value, KINDS[stage.output]):
        raise _mismatch(ref, f"output of type {type(value).__name__}", stage.output)
    group, row = stages.group_of(ref), stages.row_of(ref)
    pieces = [
        Piece(f"{group}/{name}", row, data, plan_in(stage, name), attributes)
        for name, (data, attributes) in _group_arrays(ref, value).items()
    ]
    if not isinstance(value, Update):
        return pieces
    if stages[ref.stage].ends_iteration:
        names = sorted(value.metrics)
        metrics = np.array([value.metrics[_checked_name(ref, name)] for name in names], np.float64)
        return [*pieces, Piece(stages.metrics_array(ref.iteration), ref.iteration, metrics, METRICS, {"names": names})]
    if value.metrics:
        raise _mismatch(ref, f"{len(value.metrics)} metrics", "none: no iteration has begun")
    return pieces


def decode(stage: StoredStage, group: str, groups: Mapping[str, Stored]) -> Value:
    """Decode a stage's output from the arrays of its group; metrics are in a separate group.

    Custom outputs are decoded as instances of a generated class with the same fields. Raises KeyError if an array is
    missing, and ValueError if the arrays are inconsistent.
    """
    arrays = groups[group]
    if (schema := stage.schema) is not None:
        value = schema.record(
            {f.name: _unprefixed(arrays, f"{f.name}.") if f.mapping else arrays[f.name][0] for f in schema.fields}
        )
        if problem := schema.problem_of(value):
            raise ValueError(problem)
        return value
    kind = KINDS[stage.output]
    if kind is Update:
        learner = LearnerState(**{name: _unpack(arrays, name, leading=0) for name in _LEARNER_FIELDS})
        values, about = next(iter(groups.get(METRICS_GROUP, {}).values()), (np.zeros(0), {"names": []}))
        return Update(learner, dict(zip(about["names"], values.tolist(), strict=True)))
    if kind is TaskParams:
        return TaskParams(_unpack(arrays, "params", leading=1))
    parts: dict[str, Any] = {}
    for f in fields(kind):
        if (origin := get_origin(f.type)) is Mapping:
            parts[f.name] = _unprefixed(arrays, f"{f.name}.")
        elif origin is tuple:
            parts[f.name] = tuple(arrays[_DESCRIBED[kind]][1][f.name])
        elif f.default is MISSING or f.name in arrays:  # only some algorithms store the other fields
            parts[f.name] = arrays[f.name][0]
    return kind(**parts)


def as_read(stages: StageTable, ref: StageRef, value: Value) -> Value:
    """Return a copy of an output as later stages will read it from the store: its stored arrays, in C order.

    Raises LayoutMismatch if the output cannot be stored.
    """
    group = stages.group_of(ref)
    arrays = {name: (np.array(data, order="C"), about) for name, (data, about) in _group_arrays(ref, value).items()}
    metrics = dict(sorted(value.metrics.items())) if isinstance(value, Update) else {}
    values = (np.array([*metrics.values()], np.float64), {"names": [*metrics]})
    return decode(stages[ref.stage], group, {group: arrays, METRICS_GROUP: {"values": values}})


def _group_arrays(ref: StageRef, value: Value) -> dict[str, tuple[Array, dict[str, Any]]]:
    if isinstance(value, Update):
        packed = (_pack(ref, name, getattr(value.learner, name), leading=0) for name in _LEARNER_FIELDS)
        return {name: array for arrays in packed for name, array in arrays.items()}
    if isinstance(value, TaskParams):
        return _pack(ref, "params", value.params, leading=1)
    arrays: dict[str, tuple[Array, dict[str, Any]]] = {
        name: (_storable(ref, name, data), {}) for name, data in flatten(value).items()
    }
    if isinstance(value, TaskBatch | Evaluation):
        arrays[_DESCRIBED[type(value)]][1].update(names=list(value.names), units=list(value.units))
    names: dict[str, str] = {}
    for name in arrays:
        if (other := names.setdefault(name.casefold(), name)) != name:
            found = f"names that differ only in case: {other} and {name}"
            raise _mismatch(ref, found, "names that differ on every file system")
    return arrays


def _pack(ref: StageRef, field_name: str, mapping: Params, *, leading: int) -> dict[str, tuple[Array, dict[str, Any]]]:
    """Pack a mapping of arrays into one array [*leading axes, D] per dtype, with entry locations in the attributes.

    Entries are sorted by name, so the stored bytes do not depend on the order of the mapping, which `order` records.
    """
    kinds: dict[str, list[str]] = {}
    named = mapping.items()
    entries = {_checked_name(ref, name): _storable(ref, f"{field_name}.{name}", value) for name, value in named}
    order = {name: index for index, name in enumerate(entries)}
    for name in sorted(entries):
        kinds.setdefault(dtype_name(entries[name]), []).append(name)
    packed: dict[str, tuple[Array, dict[str, Any]]] = {}
    for kind, names in kinds.items():
        shapes = [entries[name].shape[leading:] for name in names]
        sizes = [math.prod(shape) for shape in shapes]
        rows = [entries[n].reshape(*entries[n].shape[:leading], size) for n, size in zip(names, sizes, strict=True)]
        directory = [
            {"name": name, "shape": list(shape), "offset": end - size, "order": order[name]}
            for name, shape, size, end in zip(names, shapes, sizes, accumulate(sizes), strict=True)
        ]
        packed[f"{field_name}.{kind}"] = (np.concatenate(rows, axis=-1), {"entries": directory})
    return packed


def _unpack(arrays: Stored, field_name: str, *, leading: int) -> Params:
    found: dict[str, tuple[int, Array]] = {}
    for array_name, (packed, attributes) in arrays.items():
        if array_name.rpartition(".")[0] != field_name:
            continue
        for entry in attributes["entries"]:
            shape = (*packed.shape[:leading], *entry["shape"])
            part = packed[..., entry["offset"] : entry["offset"] + math.prod(entry["shape"])]
            # Copy, since entries are used individually as contiguous matrices.
            found[entry["name"]] = (entry["order"], np.ascontiguousarray(part).reshape(shape))
    return {name: value for name, (_, value) in sorted(found.items(), key=lambda item: item[1][0])}


def _unprefixed(arrays: Stored, prefix: str) -> Params:
    return {name.removeprefix(prefix): data for name, (data, _) in sorted(arrays.items()) if name.startswith(prefix)}


def _storable(ref: StageRef, name: str, value: Array) -> Array:
    _checked_name(ref, name)
    if value.dtype not in _DTYPE_NAMES:
        raise _mismatch(ref, f"{name} of dtype {value.dtype}", f"one of {', '.join(DTYPES)}, in native byte order")
    return value


def _checked_name(ref: StageRef, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _mismatch(ref, f"an array named {name!r}", "letters, digits, '_', '-' and '.', at most 200 of them")
    return name


def _mismatch(ref: StageRef, found: str, required: str) -> LayoutMismatch:
    return LayoutMismatch(ref, found=found, required=required, action="Change what the stage returns")


def digest(value: Value | LearnerState) -> dict[str, str]:
    """Return the SHA-256 of each array in a value, keyed and sorted by name."""
    return {name: entry.sha256 for name, entry in array_digests(value).items()}


def output_digest(digests: Mapping[str, str]) -> str:
    """Combine the result of `digest` into a single digest."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def differing(stored: Mapping[str, ArrayDigest], found: Mapping[str, ArrayDigest]) -> list[str]:
    """Return the sorted names of arrays whose digests differ or that exist on only one side."""
    return sorted(name for name in {*stored, *found} if stored.get(name) != found.get(name))


def array_digests(value: Value | LearnerState) -> dict[str, ArrayDigest]:
    """Return the digest, dtype and shape of each array in a value, keyed and sorted by name."""
    digests: dict[str, ArrayDigest] = {}
    for name, array in sorted(flatten(value).items()):
        # Include dtype and shape, because the same bytes with another shape are a different array.
        state = hashlib.sha256(f"{array.dtype.str}{list(array.shape)}\n".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        digests[name] = ArrayDigest(state.hexdigest(), dtype_name(array), array.shape)
    return digests
