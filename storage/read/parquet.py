"""Tables of Parquet files, of bounded size."""
# pyarrow ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from metaloom.storage.errors import damaged

_MOST_CELLS = 2**24
_MOST_TABLE_BYTES = 2**28


def parse_table(raw: bytes, where: Path, *, scale: int = 1) -> pa.Table:
    """The rows of iterations that the bytes of a Parquet file hold; raises DamagedRun if there are none or too many."""
    try:
        # Not pq.read_table: what it does beyond reading takes longer than a small file.
        with pq.ParquetFile(pa.BufferReader(raw)) as parquet:
            _check_size(parquet.metadata, where, scale)
            table = parquet.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are no text are a ValueError
        raise damaged(where, f"is no table ({error})") from None
    found = table.schema.get_all_field_indices("iteration")
    if len(found) != 1 or not pa.types.is_integer(table.schema.types[found[0]]):
        raise damaged(where, "has no column of iterations")
    return table


def _check_size(about: pq.FileMetaData, where: Path, scale: int) -> None:
    # A few bytes of Parquet can stand for a column of any length.
    raw_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    if about.num_rows * about.num_columns > _MOST_CELLS * scale or raw_bytes > _MOST_TABLE_BYTES * scale:
        raise damaged(where, f"claims {about.num_rows} rows of {about.num_columns} columns in {raw_bytes} bytes")
