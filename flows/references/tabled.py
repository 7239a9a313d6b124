"""What the tables of a run say of its outputs: commands show tables, and no digest of an output covers them."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from metaloom.pipeline.types import EpisodeBatch, Evaluation, TaskBatch, Update
from metaloom.storage import Run, StageRef
from metaloom.storage.format.codec import Value
from metaloom.storage.read.frames import read_tables
from metaloom.storage.read.parquet import parse_table
from metaloom.storage.read.tables import EpisodeSummary, evaluation_file, iteration_tables, summarize


class TableCheck:
    """Compares the tables of a run with outputs, which it is told in the order of their computation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: TaskBatch | None = None
        self._rounds: dict[int, EpisodeSummary] = {}

    def see(self, ref: StageRef, value: Value) -> Iterator[str]:
        """Give the names of the tables that an output ends and that say something else.

        Raises:
            StageMissing: there is no such table.
            DamagedRun: a table is damaged.
        """
        if isinstance(value, TaskBatch):
            self._tasks = value
        elif isinstance(value, EpisodeBatch) and ref.stage == self._run.stages.named("rollouts"):
            self._rounds[ref.step] = summarize(value)
        elif isinstance(value, Evaluation):
            yield from self._false(ref.iteration, "evaluations", evaluation_file(ref.iteration, value))
        elif isinstance(value, Update) and ref.stage == self._run.stages.last:
            computed = iteration_tables(ref.iteration, self._tasks, self._rounds, value.metrics)
            self._tasks, self._rounds = None, {}
            for name, raw in computed.items():
                yield from self._false(ref.iteration, name, raw)

    def _false(self, iteration: int, name: str, raw: bytes) -> Iterator[str]:
        stored = read_tables(self._run.files, name, [iteration])
        if not _agree(stored, parse_table(raw, Path(name))):
            yield name


def _agree(stored: pa.Table, computed: pa.Table) -> bool:
    """Tell whether a table says what was computed, all of it and no more, in the same units.

    Packed tables have the columns of other iterations too, without values.
    """
    more = {*stored.column_names} - {*computed.column_names}
    return (
        stored.num_rows == computed.num_rows
        and all(stored[name].null_count == stored.num_rows for name in more)
        and all(
            name in stored.column_names
            and _values(stored[name]) == _values(computed[name])
            and _unit(stored, name) == _unit(computed, name)
            for name in computed.column_names
        )
    )


def _unit(table: pa.Table, name: str) -> bytes | None:
    return (table.schema.field(name).metadata or {}).get(b"unit")


def _values(column: pa.ChunkedArray) -> list[object]:
    """The values of a column whatever type holds them, in which NaN equals itself."""
    return ["NaN" if value != value else value for value in column.to_pylist()]
