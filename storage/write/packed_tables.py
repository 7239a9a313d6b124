"""Parquet files of a segment: its records, and the derived tables of all its iterations."""

import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaloom.storage.format.columns import column, text_column
from metaloom.storage.format.records import StageRecord
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.frames import read_tables

_GROUP = 256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def records_file(records: Sequence[StageRecord]) -> bytes:
    """Return a Parquet file of records: a column per frequently used field, and one with the original documents."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, _rows([]).schema, compression="zstd", compression_level=1) as writer:
        for first in range(0, len(records), _GROUP):  # all rows at once would need as much memory as the records
            writer.write_table(_rows(records[first : first + _GROUP]))
    return sink.getvalue()


def _rows(records: Sequence[StageRecord]) -> pa.Table:
    microsecond = timedelta(microseconds=1)
    started = [(datetime.fromisoformat(record.started) - _EPOCH) // microsecond for record in records]
    columns = {
        "sequence": column(np.array([record.sequence for record in records], np.int64)),
        "iteration": column(np.array([record.ref.iteration for record in records], np.int32)),
        "stage": text_column([record.ref.stage for record in records]),
        "step": column(np.array([record.ref.step for record in records], np.int32)),
        "digest": text_column([record.digest for record in records]),
        "session": column(np.array([record.session for record in records], np.int32)),
        "started": column(np.array(started, np.int64)).cast(pa.timestamp("us", "UTC")),
        "seconds": column(np.array([record.seconds for record in records])),
        "stored_bytes": column(np.array([record.stored_bytes for record in records], np.int64)),
        "sha256": text_column([record.sha256 for record in records]),
        "document": text_column([record.content().decode() for record in records]),
    }
    return pa.table(columns)


def table_file(files: CommittedFiles, name: str, records: Sequence[StageRecord]) -> bytes | None:
    """Return a Parquet file with a derived table's rows for some iterations; None if there are none."""
    with_rows = {r.ref.iteration for r in records if any(t.path.split("/")[1] == name for t in r.tables)}
    if not with_rows:
        return None
    sink = io.BytesIO()
    pq.write_table(read_tables(files, name, sorted(with_rows)), sink, compression="zstd", compression_level=1)
    return sink.getvalue()


def iteration_file(table: pa.Table, iteration: int) -> bytes:
    """Rebuild an iteration's original Parquet file from its rows in a segment's table."""
    rows = table.filter(pc.field("iteration") == iteration).combine_chunks()
    # Remove metadata that reading Parquet adds to the schema.
    fields = [
        pa.field(f.name, f.type, metadata={b"unit": f.metadata[b"unit"]} if b"unit" in (f.metadata or {}) else None)
        for f in rows.schema
    ]
    sink = io.BytesIO()
    pq.write_table(pa.table(rows.columns, schema=pa.schema(fields)), sink, compression="zstd")
    return sink.getvalue()
