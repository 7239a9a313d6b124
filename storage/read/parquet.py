"""Reading of Parquet files with bounded memory."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaloom.storage.errors import damaged
from metaloom.storage.format.segments import MOST_RECORDS

_MOST_CELLS = 2**24
_MOST_TABLE_BYTES = 2**28
_MOST_TEXT_BYTES = 2**28
_NUMBERS = ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")
_TEXT = "BYTE_ARRAY"


def parse_table(raw: bytes, where: Path, *, scale: int = 1) -> pa.Table:
    """Parse a Parquet file with per-iteration rows. Raises DamagedRun if it is invalid or too large."""
    try:
        # The overhead of pq.read_table would exceed the time to read a small file.
        with pq.ParquetFile(pa.BufferReader(raw)) as parquet:
            _check_kinds(parquet.schema, where, _NUMBERS)
            # A few bytes of Parquet can expand to a column of any length.
            about = parquet.metadata
            size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            if about.num_rows * about.num_columns > _MOST_CELLS * scale or size > _MOST_TABLE_BYTES * scale:
                raise damaged(where, f"claims {about.num_rows} rows of {about.num_columns} columns in {size} bytes")
            table = parquet.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are not valid text raise ValueError
        raise damaged(where, f"not a table ({error})") from None
    found = table.schema.get_all_field_indices("iteration")
    if len(found) != 1 or not pa.types.is_integer(table.schema.types[found[0]]):
        raise damaged(where, "has no iteration column")
    return table


def open_records(raw: bytes, where: Path) -> pq.ParquetFile:
    """Open a Parquet file of records. Use `read_columns` to read its text, since that bounds memory use."""
    try:
        schema = pq.ParquetFile(pa.BufferReader(raw)).schema
        _check_kinds(schema, where, (*_NUMBERS, _TEXT))
        parquet = pq.ParquetFile(pa.BufferReader(raw), read_dictionary=schema.names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(where, f"not a table ({error})") from None
    about = parquet.metadata
    largest = max((about.row_group(n).total_byte_size for n in range(about.num_row_groups)), default=0)
    if about.num_rows > MOST_RECORDS or largest > _MOST_TEXT_BYTES:
        raise damaged(where, f"claims {about.num_rows} rows, and up to {largest} bytes at once")
    return parquet


def read_columns(
    parquet: pq.ParquetFile, names: Sequence[str], where: Path, *, group: int | None = None
) -> list[list[object]]:
    """Read the named columns of a file of records, for all rows or one row group."""
    try:
        groups = range(parquet.num_row_groups) if group is None else [group]
        table = parquet.read_row_groups([*groups], [*names], use_threads=False)
        return [_values(table.column(name), where) for name in names]
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:  # invalid text raises ValueError
        raise damaged(where, f"not a table of records ({error})") from None


def _values(column: pa.ChunkedArray, where: Path) -> list[object]:
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    # Dictionary encoding: a long text may be referenced millions of times, so check before expanding it.
    taken = 0
    for part in column.chunks:
        lengths = pc.call_function("binary_length", [part.dictionary])
        taken += pc.call_function("sum", [lengths.take(part.indices)]).as_py() or 0
    if taken > _MOST_TEXT_BYTES:
        raise damaged(where, f"has a column of {taken} bytes")
    return column.cast(pa.string()).to_pylist()


def _check_kinds(schema: pq.ParquetSchema, where: Path, kinds: Sequence[str]) -> None:
    # A few bytes may expand to a list or text of any length.
    for column in schema:
        if column.physical_type not in kinds or column.max_repetition_level:
            kind = "lists" if column.max_repetition_level else column.physical_type
            raise damaged(where, f"has the column {column.name!r} of {kind}, not of one of {', '.join(kinds)}")
