"""Parquet files of a segment: its records, and the derived tables of all its iterations."""

import io
from collections.abc import Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaloom.storage.format.records import StageRecord
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.frames import read_tables

_GROUP = 256
_RECORDS = pa.schema(
    [
        ("sequence", pa.int64()),
        ("iteration", pa.int32()),
        ("stage", pa.string()),
        ("step", pa.int32()),
        ("digest", pa.string()),
        ("session", pa.int32()),
        ("started", pa.timestamp("us", "UTC")),
        ("seconds", pa.float64()),
        ("stored_bytes", pa.int64()),
        ("sha256", pa.string()),
        ("document", pa.string()),
    ]
)


def records_file(records: Sequence[StageRecord]) -> bytes:
    """Parquet file of records: what is asked for often as columns, and each as the document that it was."""
    rows = [
        {
            "sequence": record.sequence,
            "iteration": record.ref.iteration,
            "stage": record.ref.stage,
            "step": record.ref.step,
            "digest": record.digest,
            "session": record.session,
            "started": datetime.fromisoformat(record.started),
            "seconds": record.seconds,
            "stored_bytes": record.stored_bytes,
            "sha256": record.sha256,
            "document": record.content().decode(),
        }
        for record in records
    ]
    return _parquet(pa.Table.from_pylist(rows, schema=_RECORDS), _GROUP)


def table_file(files: CommittedFiles, name: str, records: Sequence[StageRecord]) -> bytes | None:
    """Parquet file of the rows of a derived table of some iterations; None if there are none."""
    with_rows = {r.ref.iteration for r in records if any(t.path.split("/")[1] == name for t in r.tables)}
    return _parquet(read_tables(files, name, sorted(with_rows)), None) if with_rows else None


def iteration_file(table: pa.Table, iteration: int) -> bytes:
    """Parquet file of the rows of one iteration, as it was before they were packed."""
    rows = table.filter(pc.field("iteration") == iteration).combine_chunks()
    # What reading Parquet adds to the schema was not in it.
    fields = [
        pa.field(f.name, f.type, metadata={b"unit": f.metadata[b"unit"]} if b"unit" in (f.metadata or {}) else None)
        for f in rows.schema
    ]
    sink = io.BytesIO()
    pq.write_table(pa.table(rows.columns, schema=pa.schema(fields)), sink, compression="zstd")
    return sink.getvalue()


def _parquet(table: pa.Table, row_group_size: int | None) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=row_group_size, compression="zstd", compression_level=1)
    return sink.getvalue()
