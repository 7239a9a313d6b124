"""What the tables of a run say of its outputs: commands show tables, and no digest of an output covers them."""

from collections.abc import Collection, Iterator, Mapping
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
        self._loose: set[str] = set()

    def see(self, ref: StageRef, value: Value, *, identical: bool = True) -> Iterator[str]:
        """Give the names of the tables that an output ends and that say something else.

        Args:
            ref: The output.
            value: What was computed.
            identical: False if the record says something else. Its tables then need only the same columns and units.

        Raises:
            StageMissing: there is no such table.
            DamagedRun: a table is damaged.
        """
        if isinstance(value, TaskBatch):
            self._tasks = value
            self._loose |= set() if identical else {"tasks", "episodes"}
        elif isinstance(value, EpisodeBatch) and ref.stage == self._run.stages.named("rollouts"):
            self._rounds[ref.step] = summarize(value)
            self._loose |= set() if identical else {"episodes"}
        elif isinstance(value, Evaluation):
            loose: set[str] = set() if identical else {"evaluations"}
            yield from self._false(ref.iteration, {"evaluations": evaluation_file(ref.iteration, value)}, loose)
        elif isinstance(value, Update) and ref.stage == self._run.stages.last:
            computed = iteration_tables(ref.iteration, self._tasks, self._rounds, value.metrics)
            loose = self._loose if identical else self._loose | {"metrics"}
            self._tasks, self._rounds, self._loose = None, {}, set()
            yield from self._false(ref.iteration, computed, loose)

    def _false(self, iteration: int, computed: Mapping[str, bytes], loose: Collection[str]) -> Iterator[str]:
        for name, raw in computed.items():
            stored = read_tables(self._run.files, name, [iteration])
            if not _agree(stored, parse_table(raw, Path(name)), values=name not in loose):
                yield name


def _agree(stored: pa.Table, computed: pa.Table, *, values: bool) -> bool:
    """Return True if a table says what was computed, all of it and no more, in the same units.

    Packed tables have the columns of other iterations too, without values.

    Args:
        stored: Table of the run.
        computed: Table of what was computed.
        values: False to compare names and units of the columns only.
    """
    more = {*stored.column_names} - {*computed.column_names}
    return (
        (stored.num_rows == computed.num_rows or not values)
        and all(stored[name].null_count == stored.num_rows for name in more)
        and all(
            name in stored.column_names
            and (not values or _values(stored[name]) == _values(computed[name]))
            and _unit(stored, name) == _unit(computed, name)
            for name in computed.column_names
        )
    )


def _unit(table: pa.Table, name: str) -> bytes | None:
    return (table.schema.field(name).metadata or {}).get(b"unit")


def _values(column: pa.ChunkedArray) -> list[object]:
    """The values of a column whatever type holds them, in which NaN equals itself."""
    return ["NaN" if value != value else value for value in column.to_pylist()]
