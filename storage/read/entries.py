"""Arrays of a stage as an Arrow table, with one row per entry along shared axes."""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import Array
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.columns import column
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.frames import read_tables

_OF_STEPS = ("task", "episode", "t")


def read_entries(files: CommittedFiles, refs: Iterable[StageRef], columns: Sequence[str] | None) -> pa.Table:
    """Read one stage's outputs as a table: `iteration`, `step`, the index along each shared axis, and the arrays.

    Shared axes are the leading axes common to all columns; further axes become lists. Padding is omitted. Raises
    ValueError if a column does not exist or the outputs have different shapes.
    """
    tables = [_entries(files, ref, columns) for ref in refs]
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as problem:
        raise ValueError(f"found outputs that one table cannot hold ({problem}); read fewer inner steps") from None


def _entries(files: CommittedFiles, ref: StageRef, columns: Sequence[str] | None) -> pa.Table:
    record, group = files.record(ref), files.stages.group_of(ref)
    paths = [chunk.array for chunk in record.chunks]
    specs = {name: files.spec(path) for path in paths for folder, _, name in [path.partition("/")] if folder == group}
    if unknown := [name for name in columns or () if name not in specs]:
        raise ValueError(f"{ref} has no column {unknown[0]}; available columns: {', '.join(specs)}")
    chosen = {name: specs[name] for name in columns or specs}
    arrays = {name: data for name, (data, _) in files.read_arrays(record, [*chosen])[group].items()}
    shared = _shared([*chosen.values()])
    sizes = next(iter(arrays.values())).shape[: len(shared)] if arrays else ()
    real = _real(files, ref, sizes) if shared[:3] == _OF_STEPS else np.ones(sizes, np.bool_)
    if shared[3:]:
        real = np.broadcast_to(real.reshape(*real.shape, *[1] * (len(sizes) - real.ndim)), sizes)
    index = np.argwhere(real).astype(np.int32)
    found = {
        name: column(np.full(len(index), n, np.int32)) for name, n in (("iteration", ref.iteration), ("step", ref.step))
    }
    found |= {axis: column(index[:, n].copy()) for n, axis in enumerate(shared)}
    found |= {name: column(arrays[name][real]) for name in chosen}
    return pa.table(found)


def _shared(specs: Sequence[ArraySpec]) -> tuple[str, ...]:
    """Return the names of the leading axes common to all arrays."""
    axes: list[str] = []
    for names in zip(*(spec.dims[1:] for spec in specs), strict=False):
        if len({*names}) > 1:
            break
        axes.append(names[0])
    return tuple(axes)


def _real(files: CommittedFiles, ref: StageRef, sizes: Sequence[int]) -> Array:
    """Return a mask of the real steps in an inner step's rollouts; all True if the axis sizes differ."""
    episodes = read_tables(files, "episodes", [ref.iteration])
    step, *places = (episodes[name].to_numpy() for name in ("step", "task", "episode", "length"))
    task, episode, length = (values[step == ref.step] for values in places)
    if not (len(task) and task.max() < sizes[0] and episode.max() < sizes[1] and length.max() <= sizes[2]):
        return np.ones(sizes, np.bool_)
    lengths = np.zeros(sizes[:2], np.int32)
    lengths[task, episode] = length
    return np.arange(sizes[2]) < lengths[..., None]
