"""Files that list tasks for evaluations."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metaloom.flows.errors import UsageError
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.envs.contract import TaskField


def load_tasks(path: Path, fields: Sequence[TaskField]) -> list[list[float]]:
    """Return the tasks in a file, each as a list of values in the order of `fields`.

    A .json, .yaml or .yml file contains a list of lists or of mappings keyed by field. A .parquet file has one column
    per field, which may be named `task_*` as in a run's tables.
    """
    if path.suffix not in (".json", ".yaml", ".yml", ".parquet"):
        hint = f"; did you mean --num-tasks {path}?" if str(path).isdigit() else ""
        raise UsageError(f"tasks must be held-out, train, or a .json, .yaml or .parquet file, got {str(path)!r}{hint}")
    try:
        if path.suffix == ".parquet":
            table, known = pq.read_table(path), {f"task_{field.name}": field.name for field in fields}
            # A run's tables have other columns besides tasks.
            if any(name in known for name in table.column_names):
                table = table.select([name for name in table.column_names if name in known])
            rows = table.rename_columns([known.get(name, name) for name in table.column_names]).to_pylist()
        else:
            rows = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {path} as tasks: {error}") from None
    if not isinstance(rows, list) or not rows:
        found = "an empty list" if rows == [] else type(rows).__name__
        raise UsageError(f"{path}: expected a non-empty list of tasks, got {found}")
    return [_task(path, n, row, fields) for n, row in enumerate(rows)]


def _task(path: Path, n: int, row: Any, fields: Sequence[TaskField]) -> list[float]:
    names = [field.name for field in fields]
    if isinstance(row, Mapping):
        if {*row} != {*names}:
            raise UsageError(f"{path}: task {n} has the fields {sorted(map(str, row))}; expected {names}")
        row = [row[name] for name in names]
    if (
        not isinstance(row, list)
        or len(row) != len(names)
        or not all(
            # Compare with the largest float, since any integer is less than infinity, even one that float() rejects.
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            for value in row
        )
    ):
        raise UsageError(f"{path}: task {n} is {row!r}; expected {len(names)} finite numbers {names}")
    return [float(number) for number in row]
