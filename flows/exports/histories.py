"""Learning histories: all episodes of a task in training order, for in-context reinforcement learning.

A history contains all episodes of one task. How tasks are identified depends on the run:

- by task, with a fixed set of tasks: one history per task id, over all iterations;
- by task, with a distribution of tasks: one history per draw, over the inner steps of its iteration;
- by position: one history per index in the meta-batch, over all iterations; its task may change.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaloom.flows.exports import By, ExportFormat
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch
from metaloom.storage.export import Export
from metaloom.storage.format.codec import flatten
from metaloom.storage.format.columns import column, column_type
from metaloom.storage.read.tables import episode_columns
from metaloom.storage.run import Iterations, Run

_OPEN_FILES = 128  # maximum number of open files; more histories need several passes over the run


def export_histories(
    run: Run,
    folder: Path,
    done: Export,
    *,
    by: By = "task",
    iterations: Iterations = None,
    steps: Sequence[int] | None = None,
) -> None:
    """Write one row per episode, grouped by history.

    A file contains one history (`task-00000003.parquet`, `position-00000003.parquet`) or, with a distribution, all
    histories of an iteration (`iteration-00000003.parquet`). Within a file, rows are sorted by `history` and `order`,
    the index of the episode in its history. `observations` has one more entry than `actions` and `rewards`.
    """
    available = list(done.available(run, iterations, steps))
    # Tasks from a distribution have no ids.
    if by == "task" and not all((run[i].tasks().ids >= 0).all() for i, _ in available):
        for n, (i, steps_of) in enumerate(available):
            done.progress(n, len(available))
            tasks, batches = run[i].tasks(), [(k, run[i].rollouts(k)) for k in steps_of]
            with _Files(folder, "iteration") as files:
                for b, (k, episodes) in product(range(len(tasks)), batches):
                    # Index of the draw in the run, if all meta-batches have this size.
                    history = i * len(tasks) + b
                    done.rows += files.write(i, history, _rows(i, k, tasks, episodes, [b]))
        return
    keys = sorted({int(key) for i, _ in available for key in _keys(run[i].tasks(), by)})
    for start in range(0, len(keys), _OPEN_FILES):
        with _Files(folder, by) as files:
            wanted = set(keys[start : start + _OPEN_FILES])
            for n, (i, ks) in enumerate(available):
                done.progress(n, len(available))
                tasks = run[i].tasks()
                keys_of = _keys(tasks, by)
                places = {key: np.flatnonzero(keys_of == key).tolist() for key in sorted(wanted & {*keys_of.tolist()})}
                for k in ks if places else ():
                    episodes = run[i].rollouts(k)
                    for key, at in places.items():
                        done.rows += files.write(key, key, _rows(i, k, tasks, episodes, at))


def _keys(tasks: TaskBatch, by: By) -> Array:
    """Return the index of the history to which each task of an iteration belongs, [B]."""
    return tasks.ids if by == "task" else np.arange(len(tasks))


def _rows(iteration: int, k: int, tasks: TaskBatch, episodes: EpisodeBatch, places: Sequence[int]) -> pa.Table:
    """Return a table of the selected tasks' episodes, without the columns `history` and `order`."""
    chosen = np.array(places)
    # Skip empty slots.
    found = np.argwhere(episodes.lengths[chosen] > 0)
    b, e = chosen[found[:, 0]], found[:, 1]
    lengths = episodes.lengths[b, e]
    table: dict[str, pa.Array] = {
        "iteration": column(np.full(len(b), iteration, np.int32)),
        "step": column(np.full(len(b), k, np.int32)),
        "task": column(b.astype(np.int32)),
        "episode": column(e.astype(np.int32)),
        **{name: column(values[b, e]) for name, values in episode_columns(flatten(episodes)).items()},
        "task_id": column(tasks.ids[b]),
    }
    for p, name in enumerate(tasks.names):
        table[f"task_{name}"] = column(tasks.params[b, p])
    table["observations"] = _lists(episodes.observations[b, e], lengths + 1)
    table["actions"] = _lists(episodes.actions[b, e], lengths)
    table["rewards"] = _lists(episodes.rewards[b, e], lengths)
    return pa.table(table)


def _lists(values: Array, lengths: Array) -> pa.Array:
    """Return padded values [n, T, ...] as one unpadded list of scalars or vectors per episode."""
    flat = values[np.arange(values.shape[1]) < lengths[:, None]]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = column_type(values.dtype, int(np.prod(values.shape[2:])) if values.ndim > 2 else None)
    return pa.ListArray.from_arrays(column(offsets), column(flat).cast(kind))


class _Files(ExitStack):
    """Context manager for the Parquet files of histories; it assigns each episode its `order`."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        self.folder, self.kind = folder, kind
        self.writers: dict[int, pq.ParquetWriter] = {}
        self.orders = Counter[int]()

    def write(self, file: int, history: int, rows: pa.Table) -> int:
        """Append episodes to a history in the file with this number; return the number of episodes."""
        first = self.orders[history]
        self.orders[history] += rows.num_rows
        order = column(np.arange(first, first + rows.num_rows, dtype=np.int64))
        number = column(np.full(rows.num_rows, history, np.int64))
        table = rows.add_column(0, "order", order).add_column(0, "history", number)
        if file not in self.writers:
            path = self.folder / f"{self.kind}-{file:08d}.parquet"
            self.writers[file] = self.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
        self.writers[file].write_table(table)
        return rows.num_rows


FORMAT = ExportFormat(export_histories, holds_episodes=True)
