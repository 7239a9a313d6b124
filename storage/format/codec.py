"""Batches as arrays on disk and back.

Two views of one value: `flatten` names the arrays a user thinks in (one per parameter, one per metric), which digests
and comparisons are about; `encode` names the arrays that are stored, in which each mapping of parameters is packed into
one array per dtype because Zarr costs per array and not per byte.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast

import numpy as np

from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Metrics,
    Minibatches,
    Params,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.storage.errors import LayoutMismatch
from metaloom.storage.format.layout import METRICS, ArrayPlan, plan_in
from metaloom.storage.format.refs import StageRef
from metaloom.storage.format.stages import METRICS_GROUP, StageTable

Value = TaskBatch | EpisodeBatch | Samples | TaskParams | Minibatches | Update | Evaluation
Stored = Mapping[str, tuple[Array, Mapping[str, Any]]]
"""Content of one group: array name -> array, attributes."""

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
_DTYPE_NAMES = {np.dtype(name): name for name in DTYPES}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
KINDS: Mapping[str, type[Value]] = {
    kind.__name__: kind for kind in (TaskBatch, EpisodeBatch, Samples, TaskParams, Minibatches, Update, Evaluation)
}
"""Types of outputs, by the names that tables of stages say."""


@dataclass(frozen=True)
class Piece:
    """One row of one stored array.

    Attributes:
        path: of the array, below `data.zarr`.
        row: index on the leading axis.
        data: the row, contiguous, without the leading axis.
        plan: of the array.
        attributes: what the array says about itself; the same in every row.
    """

    path: str
    row: int
    data: Array
    plan: ArrayPlan | None
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])


def flatten(value: Value | LearnerState) -> dict[str, Array]:
    """The arrays of a value by name, nested names joined with dots."""
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
    """The name of an array's dtype; looked up, because numpy takes 20 microseconds to work one out."""
    return _DTYPE_NAMES.get(array.dtype) or str(array.dtype)


def encode(stages: StageTable, ref: StageRef, value: Value) -> list[Piece]:
    """The stored arrays of a stage's output.

    Raises:
        LayoutMismatch: the value is not what the stage yields, or holds something that cannot be stored.
    """
    expected = stages[ref.stage].output
    if not isinstance(value, KINDS[expected]):
        raise _mismatch(ref, f"output of type {type(value).__name__}", expected)
    arrays = _learner_arrays(ref, value.learner) if isinstance(value, Update) else _group_arrays(ref, value)
    group, row = stages.group_of(ref), stages.row_of(ref)
    pieces = [
        Piece(f"{group}/{name}", row, data, plan_in(expected, name), attributes)
        for name, (data, attributes) in arrays.items()
    ]
    if not isinstance(value, Update):
        return pieces
    if stages[ref.stage].ends_iteration:
        return [*pieces, _encode_metrics(ref, value.metrics)]
    if value.metrics:
        raise _mismatch(ref, f"{len(value.metrics)} metrics", "none: there is no iteration yet that they describe")
    return pieces


def decode(output: str, group: str, groups: Mapping[str, Stored]) -> Value:
    """An output from the arrays of each group that it was written to.

    Args:
        output: the name of its type.
        group: that holds it; metrics are in one of their own.
        groups: what was read.

    Raises:
        KeyError: an array that belongs to the output is not among them.
        ValueError: the arrays do not fit together.
    """
    if output == Update.__name__:
        return Update(_decode_learner(groups[group]), _decode_metrics(groups.get(METRICS_GROUP, {})))
    return _DECODERS[output](groups[group])


def _decode_tasks(arrays: Stored) -> TaskBatch:
    params, attributes = arrays["params"]
    return TaskBatch(params, arrays["ids"][0], tuple(attributes["names"]), tuple(attributes["units"]))


def _decode_episodes(arrays: Stored) -> EpisodeBatch:
    return EpisodeBatch(
        **{f.name: arrays[f.name][0] for f in fields(EpisodeBatch) if f.name in arrays},
        behavior=_unprefixed(arrays, "behavior."),
        reward_terms=_unprefixed(arrays, "reward_terms."),
        facts=_unprefixed(arrays, "facts."),
    )


def _decode_evaluation(arrays: Stored) -> Evaluation:
    attributes = arrays["task_params"][1]
    names = [f.name for f in fields(Evaluation) if f.name not in ("names", "units") and not f.name.endswith("_facts")]
    return Evaluation(
        names=tuple(attributes["names"]),
        units=tuple(attributes["units"]),
        **{name: arrays[name][0] for name in names},
        test_facts=_unprefixed(arrays, "test_facts."),
        adaptation_facts=_unprefixed(arrays, "adaptation_facts."),
    )


_DECODERS: Mapping[str, Callable[[Stored], Value]] = {
    "TaskBatch": _decode_tasks,
    "EpisodeBatch": _decode_episodes,
    "Samples": lambda arrays: Samples(**_present(Samples, arrays)),
    "TaskParams": lambda arrays: TaskParams(_unpack(arrays, "params", leading=1)),
    "Minibatches": lambda arrays: Minibatches(**_present(Minibatches, arrays)),
    "Evaluation": _decode_evaluation,
}


def _present(kind: type[Samples | Minibatches], arrays: Stored) -> Params:
    """The arrays of a value by field; a field with a default is an array that only some algorithms need."""
    wanted = [f.name for f in fields(kind) if f.default is MISSING or f.name in arrays]
    return {name: arrays[name][0] for name in wanted}


def _group_arrays(ref: StageRef, value: Value) -> dict[str, tuple[Array, dict[str, Any]]]:
    if isinstance(value, TaskParams):
        return _pack(ref, "params", value.params, leading=1)
    arrays: dict[str, tuple[Array, dict[str, Any]]] = {
        name: (_storable(ref, name, data), {}) for name, data in flatten(value).items()
    }
    if isinstance(value, TaskBatch | Evaluation):
        described = arrays["params" if isinstance(value, TaskBatch) else "task_params"][1]
        described.update(names=list(value.names), units=list(value.units))
    return arrays


def _learner_arrays(ref: StageRef, learner: LearnerState) -> dict[str, tuple[Array, dict[str, Any]]]:
    return {
        **_pack(ref, "params", learner.params, leading=0),
        **_pack(ref, "optimizer", learner.optimizer, leading=0),
        **_pack(ref, "extra", learner.extra, leading=0),
    }


def _encode_metrics(ref: StageRef, metrics: Metrics) -> Piece:
    names = sorted(metrics)
    values = np.array([metrics[_checked_name(ref, name)] for name in names], np.float64)
    return Piece(f"{METRICS_GROUP}/values", ref.iteration, values, METRICS, {"names": names})


def _decode_metrics(arrays: Stored) -> Metrics:
    if "values" not in arrays:
        return {}
    values, attributes = arrays["values"]
    return dict(zip(attributes["names"], values.tolist(), strict=True))


def _decode_learner(arrays: Stored) -> LearnerState:
    return LearnerState(
        params=_unpack(arrays, "params", leading=0),
        optimizer=_unpack(arrays, "optimizer", leading=0),
        extra=_unpack(arrays, "extra", leading=0),
    )


def _pack(ref: StageRef, field_name: str, mapping: Params, *, leading: int) -> dict[str, tuple[Array, dict[str, Any]]]:
    """One array [*leading axes, D] per dtype; attributes say where each entry lies.

    Entries lie in the order of their names, so that the stored bytes do not depend on the order of the mapping;
    `order` keeps that.
    """
    kinds: dict[str, list[str]] = {}
    entries = {
        _checked_name(ref, name): _storable(ref, f"{field_name}.{name}", value) for name, value in mapping.items()
    }
    order = {name: index for index, name in enumerate(entries)}
    for name in sorted(entries):
        kinds.setdefault(dtype_name(entries[name]), []).append(name)
    return {
        f"{field_name}.{kind}": _pack_kind({name: entries[name] for name in names}, order, leading)
        for kind, names in kinds.items()
    }


def _pack_kind(entries: Params, order: Mapping[str, int], leading: int) -> tuple[Array, dict[str, Any]]:
    directory: list[dict[str, Any]] = []
    rows: list[Array] = []
    offset = 0
    for name, value in entries.items():
        shape = value.shape[leading:]
        size = math.prod(shape)
        directory.append({"name": name, "shape": list(shape), "offset": offset, "order": order[name]})
        rows.append(value.reshape(*value.shape[:leading], size))
        offset += size
    return np.concatenate(rows, axis=-1), {"entries": directory}


def _unpack(arrays: Stored, field_name: str, *, leading: int) -> Params:
    found: dict[str, tuple[int, Array]] = {}
    for array_name, (packed, attributes) in arrays.items():
        if array_name.rpartition(".")[0] != field_name:
            continue
        for entry in attributes["entries"]:
            shape = (*packed.shape[:leading], *entry["shape"])
            part = packed[..., entry["offset"] : entry["offset"] + math.prod(entry["shape"])]
            # Copied, because the entries of a mapping are used one by one, as contiguous matrices.
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
