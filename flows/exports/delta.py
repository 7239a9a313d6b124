"""Export of many runs' episodes, tasks, metrics and evaluations to Delta tables. Needs the extra `delta`."""

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from metaloom.flows.errors import UsageError
from metaloom.flows.exports import ExportFormat
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import StoreError, system_errors
from metaloom.storage.export import Export, ExportExists
from metaloom.storage.format.files import locked
from metaloom.storage.run import Run

TABLES = ("episodes", "tasks", "metrics", "evaluations")
_PARTITION = "run_id"
_AT_ONCE = 64


def export_delta(run: Run, folder: Path, done: Export) -> None:
    """Append a run to the Delta tables in a folder, in one transaction per table.

    OUT/episodes  OUT/tasks  OUT/metrics  OUT/evaluations    `run_id`, `run`, and the columns of `Run.episodes` etc.

    Tables are partitioned by `run_id`, which does not depend on the run's name or path. The transaction records the
    last exported iteration, so only new ones are appended.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    foreign = [path.name for path in paths if path.name not in TABLES or not path.is_dir()]
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or foreign:
        raise ExportExists(
            folder,
            found=f"{foreign[0]!r} in it" if foreign else "a link or a file",
            required=f"a new folder, or one that contains only the folders {', '.join(TABLES)}",
            action="Choose another --out",
        )
    stages = run.files.table_stages("evaluations")
    evaluated = [i for i in run.iterations if any(run.contains(StageRef(i, stage)) for stage in stages)]
    read = {"episodes": run.episodes, "tasks": run.tasks, "metrics": run.metrics, "evaluations": run.evaluations}
    appended: set[int] = set()
    required, action = "free space and permission to write it", "Free space, or choose another --out"
    with system_errors(folder, required=required, action=action):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):  # deltalake accepts the same transaction twice from writers that create a table at once
            for name in TABLES:
                iterations = evaluated if name == "evaluations" else run.iterations
                appended.update(_append(run, folder / name, read[name], iterations, done))
    done.iterations = len(appended)


def _append(
    run: Run, folder: Path, read: Callable[[Sequence[int]], pa.Table], iterations: Sequence[int], done: Export
) -> list[int]:
    """Append the iterations that a table lacks, and return them."""
    who = _identity(run)
    known = DeltaTable(folder) if DeltaTable.is_deltatable(str(folder)) else None
    have = (known.transaction_version(who) or 0) if known is not None else 0
    new = [i for i in iterations if i >= have]
    if not new:
        return []
    schema = _without_units(_with_run(read(new[-1:]), run, who).schema)
    there = pa.schema(known.schema().to_arrow()) if known is not None else pa.schema([])
    for field in schema:
        index = there.get_field_index(field.name)
        if index >= 0 and there.field(index).type != field.type:
            raise UsageError(
                f"{folder}: the column {field.name!r} has the type {there.field(index).type}, but "
                f"{field.type} in the run; all runs must have the same type. Choose another --out for this environment"
            )
    unread: list[StoreError] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(new), _AT_ONCE):
            done.progress(start, len(new))
            try:
                table = _with_run(read(new[start : start + _AT_ONCE]), run, who)
            except StoreError as error:
                unread.append(error)
                raise
            for batch in table.select(schema.names).cast(schema).to_batches():
                done.rows += batch.num_rows
                yield batch

    try:
        write_deltalake(
            known or folder,
            pa.RecordBatchReader.from_batches(schema, batches()),
            mode="append",
            partition_by=[_PARTITION],
            schema_mode="merge",
            commit_properties=CommitProperties(app_transactions=[Transaction(who, new[-1] + 1)]),
        )
    except CommitFailedError as error:
        raise UsageError(
            f"{folder}: another export of the same run was writing at the same time. Run the command again to append "
            f"what is missing ({error})"
        ) from error
    except (DeltaError, OSError) as error:  # deltalake keeps only the text of the error that made it fail
        if unread:
            raise unread[0] from None
        if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
    return new


def _without_units(schema: pa.Schema) -> pa.Schema:
    """Return the schema without column metadata: runs may have different units, which Delta does not merge."""
    return pa.schema([field.remove_metadata() for field in schema])


def _with_run(table: pa.Table, run: Run, who: str) -> pa.Table:
    for name, value in (("run", run.name), (_PARTITION, who)):
        table = table.add_column(0, name, pa.repeat(pa.scalar(value), table.num_rows))
    return table


def _identity(run: Run) -> str:
    """Return a run's ID, which is validated because it names a folder."""
    try:
        return str(uuid.UUID(str(run.info["id"])))
    except (KeyError, ValueError):
        raise UsageError(
            f"{run.path}: run.json has no valid run ID, which distinguishes the run from others in the same tables. "
            "Restore run.json from a copy of the run"
        ) from None


FORMAT = ExportFormat(export_delta, grows=True)
