"""Values of stored arrays for the page: slices of arrays, and the course of episodes."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.views.series import numbers
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageMissing, StageRef
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.records import StoredFile

MOST_NUMBERS = 2_000_000
"""Maximum number of values in a slice; larger slices contain every second, fourth, ... entry of the longer axis."""
MOST_BYTES = 2**30  # maximum size in bytes of an array to read, since a small file may decompress to gigabytes
_BY_STEP = (("task", "episode", "t"), ("task", "episode", "t_with_final"))


def slice_of(
    run: Run, ref: StageRef, array: str, at: Sequence[int], rows: int | None, columns: int
) -> tuple[Array, tuple[int, int]]:
    """Return a slice of a stored array as [rows, columns] float64, with NaN in padding, and its row and column strides.

    `array` is a path below `data.zarr`, such as rollouts_0/rewards. `at` contains an index along each axis, which is
    ignored for the axes shown: `rows` from top to bottom (None for a single row), and `columns` from left to right.
    """
    record = run.record(ref)
    chunk = next((chunk for chunk in record.chunks if chunk.array == array), None)
    if chunk is None:
        raise UsageError(f"no array {array!r}; choose one of {', '.join(c.array for c in record.chunks)}")
    spec = run.files.spec(array)
    if not spec.shape:  # a single number
        return _read(run, ref, chunk, None).reshape(1, 1).astype("<f8"), (1, 1)
    shown = [axis for axis in (rows, columns) if axis is not None]
    axes = range(len(spec.shape))
    if len(at) != len(axes) or len({*shown}) != len(shown) or any(axis not in axes for axis in shown):
        raise UsageError(f"got the axes {shown} and {len(at)} indices; expected axes and indices of {spec.dims[1:]}")
    for axis in axes:
        if axis not in shown and not 0 <= at[axis] < spec.shape[axis]:
            raise UsageError(f"{spec.dims[axis + 1]} must be an index from 0 to {spec.shape[axis] - 1}, got {at[axis]}")
    task = at[0] if spec.dims[1:2] == ("task",) and 0 not in shown else None
    values = _read(run, ref, chunk, task)
    place = [0 if task is not None and axis == 0 else index for axis, index in enumerate(at)]
    picked = values[tuple(slice(None) if axis in shown else place[axis] for axis in range(len(place)))]
    if rows is None:
        picked = picked[None]
    elif rows > columns:
        picked = picked.T
    every = (1, 1)
    while -(-picked.shape[0] // every[0]) * -(-picked.shape[1] // every[1]) > MOST_NUMBERS:
        longer = picked.shape[0] // every[0] > picked.shape[1] // every[1]
        every = (2 * every[0], every[1]) if longer else (every[0], 2 * every[1])
    return np.ascontiguousarray(picked[:: every[0], :: every[1]], dtype="<f8"), every


def episode(run: Run, ref: StageRef, task: int, index: int) -> dict[str, Any]:
    """Return all stored values of an episode over time, including those of processed samples."""
    if "lengths" not in run.record(ref).arrays:
        raise UsageError(f"{ref} has no episodes; choose a stage that samples")
    lengths = run.lengths(ref)
    B, E = lengths.shape
    if not (0 <= task < B and 0 <= index < E and lengths[task, index]):
        raise UsageError(f"no stored episode {index} of task {task}; the batch has {B} tasks x {E} episodes")
    length = int(lengths[task, index])
    samples = run.stages.in_group("samples", ref.iteration, ref.step)
    signals: list[dict[str, Any]] = []
    problems: list[str] = []
    for part in (ref, *([samples] if samples is not None and run.contains(samples) else [])):
        try:
            signals += _signals(run, part, task, index, length)
        except (StageMissing, UsageError) as problem:
            problems.append(str(problem))
    returns = [np.nansum(np.array(s["values"], np.float64)) for s in signals if s["name"] == "rewards"]
    return {
        "length": length,
        "return": next(iter(numbers(np.array(returns))), None),
        "tasks": B,
        "episodes": (lengths > 0).sum(axis=1).tolist(),
        "signals": signals,
        "problems": problems,
    }


def episode_length(run: Run, ref: StageRef, task: int, index: int) -> int:
    """Return the number of steps in an episode, even if it was thinned."""
    if ref.iteration in run.iterations:
        try:
            found = run.episodes(ref.iteration, ref.step, task=task, episode=index)["length"].to_pylist()
        except ValueError as problem:
            raise UsageError(str(problem)) from None
    else:
        lengths = run.lengths(ref)
        found = [int(lengths[task, index])] if task < len(lengths) and index < lengths.shape[1] else []
    if not found or not found[0]:
        raise UsageError(f"task {task}, episode {index} is not stored; choose a stored episode")
    return int(found[0])


def names_along(run: Run, spec: ArraySpec) -> dict[str, list[str]]:
    """Return the names and units of entries along an array's axes, keyed by axis; other axes are omitted."""
    found: dict[str, list[str]] = {}
    for dim, entries in zip(spec.dims[1:], spec.shape, strict=True):
        named: Mapping[str, str] = run.components(dim) if dim in ("observation", "action") else {}
        if len(named) != entries or not named:
            listed, units = spec.attributes.get("names", ()), spec.attributes.get("units", ())
            if dim not in ("task_field", "metric") or len(listed) != entries:
                continue
            named = dict(zip(listed, units or ["1"] * entries, strict=True))
        found[dim] = [str(name) if unit in ("", "1") else f"{name} ({unit})" for name, unit in named.items()]
    return found


def _signals(run: Run, ref: StageRef, task: int, index: int, length: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for chunk in run.record(ref).chunks:
        spec = run.files.spec(chunk.array)
        name = chunk.array.partition("/")[2]
        if spec.dims[1:4] not in _BY_STEP or name == "mask":
            continue
        require_modest(spec, [task])
        values = run.files.read_row(run.record(ref), chunk, [task])[0][0, index]
        values = values[: length + (spec.dims[3] == "t_with_final")]
        if values.size > MOST_NUMBERS:
            raise UsageError(f"{name} has {values.size} values in an episode; the page shows at most {MOST_NUMBERS}")
        flat = values.reshape(len(values), -1).T
        labels = next((names for dim, names in names_along(run, spec).items() if dim == spec.dims[-1]), None)
        found.append(
            {
                "name": name,
                "unit": spec.attributes.get("unit", ""),
                "description": spec.attributes.get("description", ""),
                "labels": labels if labels and len(labels) == len(flat) else [str(n) for n in range(len(flat))],
                "values": [numbers(row) for row in flat],
            }
        )
    return found


def _read(run: Run, ref: StageRef, chunk: StoredFile, task: int | None) -> Array:
    """Return an array as float64, for one task or all, with NaN after the end of each episode."""
    tasks = None if task is None else [task]
    spec = run.files.spec(chunk.array)
    require_modest(spec, tasks)
    values = run.files.read_row(run.record(ref), chunk, tasks)[0].astype(np.float64)
    if spec.dims[1:4] in _BY_STEP:
        # Lengths are unknown if they were thinned or the run has no rollouts.
        is_batch = run.stages[ref.stage].output == "EpisodeBatch"
        rollouts = ref if is_batch else run.stages.in_group("rollouts", ref.iteration, ref.step)
        lengths = None
        with suppress(StageMissing):
            lengths = None if rollouts is None else run.lengths(rollouts)[slice(None) if tasks is None else tasks]
        if lengths is not None and lengths.shape == values.shape[:2]:
            last = lengths[..., None] + (spec.dims[3] == "t_with_final") * (lengths[..., None] > 0)
            values[np.arange(values.shape[2]) >= last] = np.nan
    return values


def require_modest(spec: ArraySpec, tasks: Sequence[int] | None) -> None:
    """Raise UsageError if a read would take too much memory. Only the requested tasks of a sharded array are read."""
    parts = 1 if tasks is None or not spec.sharded else spec.shape[0] // len(tasks)
    num_bytes = max(spec.raw_bytes, 8 * math.prod(spec.shape))  # values become float64
    if num_bytes > MOST_BYTES * parts:
        raise UsageError(
            f"the array takes {num_bytes:,} bytes, more than the {MOST_BYTES:,} that this page can read; in "
            "Python, use metaloom.open_run(...)"
        )
