"""Export to Hive-partitioned Parquet, which DuckDB, polars, pandas and Spark open as one table."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaloom.flows.exports import ExportFormat
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.export import Export
from metaloom.storage.run import Iterations, Run

ROW_GROUP = 65_536  # number of rows per row group, which readers read as a whole


def export_parquet(
    run: Run, folder: Path, done: Export, *, iterations: Iterations = None, steps: Sequence[int] | None = None
) -> None:
    """Write the steps, without padding, to a file per iteration and inner step, and write the derived tables.

    OUT/steps/iteration=3/stage=rollouts_0/steps.parquet    columns as in `Run.steps`, without `iteration`
    OUT/episodes.parquet  OUT/tasks.parquet  OUT/metrics.parquet  and, if there are any, OUT/evaluations.parquet
    OUT/STAGE.parquet for each custom stage whose output has a custom type, as `Run.table` reads it
    """
    available = [i for i, _ in done.available(run, iterations, steps)]
    places = {i: place for place, i in enumerate(available)}
    with run.scan_steps(available, steps=steps) as batches:
        names = [name for name in batches.schema.names if name != "iteration"]
        schema = pa.schema([batches.schema.field(name) for name in names])
        for batch in batches:  # one inner step each
            i, k = batch["iteration"][0].as_py(), batch["step"][0].as_py()
            done.progress(places[i], len(places))
            file = folder / "steps" / f"iteration={i}" / f"stage=rollouts_{k}" / "steps.parquet"
            file.parent.mkdir(parents=True)
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                writer.write_batch(batch.select(names), row_group_size=ROW_GROUP)
            done.rows += batch.num_rows
    chosen = run.select(iterations)
    for name, table_of in (("episodes", run.episodes), ("tasks", run.tasks), ("metrics", run.metrics)):
        _write_table(folder / f"{name}.parquet", table_of, chosen, steps if name == "episodes" else None)
    evaluations = run.files.table_stages("evaluations")
    evaluated = [i for i in chosen if any(run.contains(StageRef(i, name)) for name in evaluations)]
    _write_table(folder / "evaluations.parquet", run.evaluations, evaluated, None)
    for stage in (stage.name for stage in run.stages.stages if stage.schema):
        refs = [ref for ref in run.refs_of(chosen) if ref.stage == stage and (steps is None or ref.step in steps)]
        thinned = {ref.iteration for ref in refs if run.is_thinned(ref)}
        whole = [i for i in dict.fromkeys(ref.iteration for ref in refs) if i not in thinned]
        table_of = partial(run.table, stage, steps=steps)
        _write_table(folder / f"{stage}.parquet", table_of, whole, None)


def _write_table(
    file: Path, table_of: Callable[[Sequence[int]], pa.Table], iterations: Sequence[int], steps: Sequence[int] | None
) -> None:
    """Write a derived table to a file, in blocks of iterations."""
    if not iterations:
        return
    with pq.ParquetWriter(file, table_of(iterations[-1:]).schema, compression="zstd") as writer:
        for start in range(0, len(iterations), 64):
            table = table_of(iterations[start : start + 64]).select(writer.schema.names)
            if steps is not None:
                table = table.filter(pc.field("step").isin(list(steps)))
            writer.write_table(table, row_group_size=ROW_GROUP)


FORMAT = ExportFormat(export_parquet)
