"""Stored batches as Arrow tables: one row per step, per episode, per task, per iteration, per record."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaloom.pipeline.types import EACH_EPISODE, Array
from metaloom.storage.errors import StageMissing, damaged
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.columns import column, column_type
from metaloom.storage.format.records import StageRecord, StoredFile
from metaloom.storage.format.refs import StageRef
from metaloom.storage.read.committed import CommittedFiles

_POSITION = ("iteration", "step", "task", "episode", "t")
_NAMES = {"observations": "observation", "actions": "action", "rewards": "reward"}
_SAMPLE_NAMES = {"returns": "return", "values": "value", "advantages": "advantage"}
_MOST_CELLS = 2**24
_MOST_TABLE_BYTES = 2**28
_DICE_SAMPLE_NAMES = {"adjusted_rewards": "adjusted_reward"}


@dataclass(frozen=True)
class _Source:
    """Source of a column of steps.

    Attributes:
        array: of the episodes, or of what was made of them.
        kind: of its numbers.
        at_end: it is a flag of the episode, which its last step has.
    """

    array: str
    kind: pa.DataType
    at_end: bool = False


def scan_steps(
    files: CommittedFiles, iterations: Sequence[int], columns: Sequence[str] | None, steps: int | Sequence[int] | None
) -> pa.RecordBatchReader:
    """One row per real step of the given iterations and inner steps, one record batch per inner step of an iteration.

    Raises:
        StageMissing: the run has no rollouts yet.
        ValueError: there is no such column.
    """
    name = files.stages.named("rollouts")
    batches = files.stages.sort(ref for ref in files.refs() if ref.stage == name)
    sources = _step_sources(files, batches)
    known = (*_POSITION, *sources)
    names = known if columns is None else tuple(columns)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"steps have no columns {unknown}; there are {', '.join(known)}")
    schema = pa.schema([pa.field(name, _kind_of(name, sources)) for name in names])
    chosen = set(iterations)
    wanted = [ref for ref in batches if ref.iteration in chosen and _is_wanted(ref.step, steps)]
    return pa.RecordBatchReader.from_batches(schema, (_step_rows(files, ref, sources, schema) for ref in wanted))


def num_tabled_steps(files: CommittedFiles, ref: StageRef) -> int:
    """Count the real steps of a round by the table of episodes, which stays when the round is thinned."""
    episodes = read_tables(files, "episodes", [ref.iteration])
    steps, lengths = (episodes[name].to_numpy() for name in ("step", "length"))
    return int(lengths[steps == ref.step].sum())


def read_tables(files: CommittedFiles, name: str, iterations: Sequence[int]) -> pa.Table:
    """The rows of a derived table that belong to some iterations.

    Raises:
        StageMissing: the run has no complete iteration, or its iterations have no such table.
        DamagedRun: a file is missing or changed.
    """
    parts = [part for i in iterations or range(1) for part in _read_parts(files, name, i)]
    if not parts and iterations and name == "evaluations":
        raise StageMissing(
            files.root,
            found="no evaluation is stored",
            required="a run that is evaluated as it trains, with evaluation.every",
            action=f"`metaloom evaluate {files.root.name}` makes one now",
        )
    if not parts:
        raise _nothing(files, f"no table of {name}")
    table = pa.concat_tables(parts, promote_options="default")
    return table if iterations else table.slice(0, 0)


def read_metrics(files: CommittedFiles, iterations: Sequence[int]) -> pa.Table:
    """The metrics of some iterations, one row each.

    From the arrays that the tables were made of: a Parquet file of one row takes longer to open than to read.

    Raises:
        StageMissing: the run has no complete iteration.
        DamagedRun: a file is missing or changed.
    """
    found: dict[int, Array] = {}
    names: Sequence[str] = ()
    for i in iterations or range(1):
        for chunk, record in _metric_chunks(files, i):
            found[i], attributes = files.read_row(record, chunk)
            names = attributes["names"]
    if not found:
        raise _nothing(files, "no table of metrics")
    values = np.stack([*found.values()]).T.copy()
    numbers = {"iteration": np.array([*found], np.int32), **dict(zip(names, values, strict=True))}
    table = pa.table({name: column(array) for name, array in numbers.items()})
    return table if iterations else table.slice(0, 0)


def lineage(records: Iterable[StageRecord]) -> pa.Table:
    """One row per record, in the order in which they were published."""
    rows = [_lineage_row(record) for record in sorted(records, key=lambda record: record.sequence)]
    return pa.Table.from_pylist(rows, schema=_LINEAGE)


def _step_sources(files: CommittedFiles, batches: Sequence[StageRef]) -> dict[str, _Source]:
    if not batches:
        raise _nothing(files, "no rollouts")
    first = files.record(batches[0])
    sources: dict[str, _Source] = {}
    per_step = files.spec(f"{files.stages.group_of(batches[0])}/rewards").shape
    for path in sorted((chunk.array for chunk in first.chunks), key=_column_order):
        array = path.partition("/")[2]
        spec = files.spec(path)
        # What holds per episode or per task, such as log_std, is no column of steps.
        if (name := _column_name(array)) and (array == "observations" or _is_per_step(spec, per_step)):
            sources[name] = _Source(array, _kind(spec.dtype, spec.shape))
    stored = {chunk.array.partition("/")[2] for chunk in first.chunks}
    ends = {
        name: _Source(name, pa.bool_(), at_end=True)
        for name, dtype in EACH_EPISODE.items()
        if dtype is np.bool_ and name in stored
    }
    if not files.stages.named("samples"):  # off policy there are no samples
        return sources | ends
    names = dict(_SAMPLE_NAMES)
    # Which columns there are is asked of the folder: a damaged record of samples is no reason to hide the rollouts.
    names |= {array: name for array, name in _DICE_SAMPLE_NAMES.items() if (files.data / "samples_0" / array).is_dir()}
    return sources | {name: _Source(array, pa.float32()) for array, name in names.items()} | ends


def _is_per_step(spec: ArraySpec, per_step: tuple[int, ...]) -> bool:
    # The names of the axes first: as many numbers may describe an episode as it can have steps. Others have none.
    named = spec.dims[3] if len(spec.dims) > 3 else ""
    return (named == "t" or named.endswith("_axis_2")) and spec.shape[:3] == per_step


def _column_name(array: str) -> str | None:
    kind, _, name = array.partition(".")
    if kind == "behavior":
        return name
    return f"reward_{name}" if kind == "reward_terms" else _NAMES.get(array)


def _column_order(path: str) -> tuple[int, str]:
    kinds = ("observations", "actions", "behavior", "rewards", "reward_terms")
    kind = path.partition("/")[2].partition(".")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), path)


def _kind(dtype: str, shape: tuple[int, ...]) -> pa.DataType:
    return column_type(np.dtype(dtype), int(np.prod(shape[3:])) if len(shape) > 3 else None)


def _kind_of(name: str, sources: dict[str, _Source]) -> pa.DataType:
    return sources[name].kind if name in sources else pa.int32()


def _is_wanted(step: int, steps: int | Sequence[int] | None) -> bool:
    return steps is None or step == steps or (not isinstance(steps, int) and step in steps)


def _step_rows(files: CommittedFiles, ref: StageRef, sources: dict[str, _Source], schema: pa.Schema) -> pa.RecordBatch:
    wanted = {sources[name].array for name in schema.names if name in sources}
    arrays = _arrays(files, ref, wanted | {"lengths"})
    samples = files.stages.in_group("samples", ref.iteration, ref.step)
    if samples and wanted & {*_SAMPLE_NAMES, *_DICE_SAMPLE_NAMES} and files.record_path(samples).exists():
        arrays |= _arrays(files, samples, wanted)
    T = files.spec(f"{files.stages.group_of(ref)}/rewards").shape[2]
    rows = _Rows(ref, arrays["lengths"], T)
    return pa.record_batch([_step_column(name, rows, arrays, sources, schema) for name in schema.names], schema=schema)


def _step_column(
    name: str, rows: "_Rows", arrays: dict[str, Array], sources: dict[str, _Source], schema: pa.Schema
) -> pa.Array:
    if name in _POSITION:
        return column(rows.position(name))
    source = sources[name]
    if source.array not in arrays:  # episodes that no stage processed
        return pa.nulls(rows.count, schema.field(name).type)
    array = arrays[source.array]
    return column(rows.at_end(array) if source.at_end else rows.of(array))


@dataclass(frozen=True)
class _Rows:
    """The real steps of a batch of episodes, in the order task, episode, t."""

    ref: StageRef
    lengths: Array
    T: int

    @property
    def count(self) -> int:
        return int(self.lengths.sum())

    def of(self, values: Array) -> Array:
        """The entries [n, ...] of an array [B, E, T or T+1, ...] that belong to real steps."""
        if self.count == self.lengths.size * self.T:
            return values[:, :, : self.T].reshape(-1, *values.shape[3:])
        return values[:, :, : self.T][self._mask]

    def at_end(self, flags: Array) -> Array:
        """Flags [B, E] of episodes, as flags of their last steps."""
        last = np.arange(self.T) == self.lengths[..., None] - 1
        return self.of(last & flags[..., None])

    def position(self, name: str) -> Array:
        B, E = self.lengths.shape
        match name:
            case "iteration":
                return np.full(self.count, self.ref.iteration, np.int32)
            case "step":
                return np.full(self.count, self.ref.step, np.int32)
            case "task":
                index = np.arange(B, dtype=np.int32)[:, None, None]
            case "episode":
                index = np.arange(E, dtype=np.int32)[None, :, None]
            case _:
                index = np.arange(self.T, dtype=np.int32)[None, None, :]
        return self.of(np.broadcast_to(index, (B, E, self.T)))

    @property
    def _mask(self) -> Array:
        return np.arange(self.T) < self.lengths[..., None]


def _arrays(files: CommittedFiles, ref: StageRef, names: Collection[str]) -> dict[str, Array]:
    groups = files.read_arrays(files.record(ref), names)
    return {name: data for arrays in groups.values() for name, (data, _) in arrays.items()}


def _metric_chunks(files: CommittedFiles, iteration: int) -> Iterator[tuple[StoredFile, StageRecord]]:
    ref = files.stages.last_ref(iteration)
    if files.record_path(ref).exists():
        record = files.record(ref)
        yield from ((chunk, record) for chunk in record.chunks if chunk.array == "metrics/values")


def _read_parts(files: CommittedFiles, name: str, iteration: int) -> Iterator[pa.Table]:
    for ref in (StageRef(iteration, stage) for stage in files.table_stages(name)):
        if files.record_path(ref).exists():
            record = files.record(ref)
            for file in record.tables:
                if file.path.split("/")[1] == name:
                    yield _parse_table(files.read_bytes(record, file), files.root / file.path)


def _parse_table(raw: bytes, where: Path) -> pa.Table:
    try:
        # Not pq.read_table: what it does beyond reading takes longer than a small file.
        with pq.ParquetFile(pa.BufferReader(raw)) as parquet:
            _check_size(parquet.metadata, where)
            return parquet.read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise damaged(where, f"is no table ({error})") from None


def _check_size(about: pq.FileMetaData, where: Path) -> None:
    # A few bytes of Parquet can stand for a column of any length.
    raw_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    if about.num_rows * about.num_columns > _MOST_CELLS or raw_bytes > _MOST_TABLE_BYTES:
        raise damaged(where, f"claims {about.num_rows} rows of {about.num_columns} columns in {raw_bytes} bytes")


def _nothing(files: CommittedFiles, found: str) -> StageMissing:
    return StageMissing(
        files.root,
        found=found,
        required="a run with a complete iteration",
        action=f"`metaloom resume {files.root.name}` computes one",
    )


_REF = [("iteration", pa.int32()), ("stage", pa.string()), ("step", pa.int32())]
_SPAN = [
    ("stages", pa.list_(pa.string())),
    ("first", pa.struct(_REF)),
    ("last", pa.struct(_REF)),
    ("outputs", pa.int64()),
    ("steps", pa.int64()),
    ("digest", pa.string()),
]
_LINEAGE = pa.schema(
    [
        ("sequence", pa.int64()),
        *_REF,
        ("digest", pa.string()),
        ("inputs", pa.list_(pa.struct([*_REF, ("digest", pa.string())]))),
        ("spans", pa.list_(pa.struct(_SPAN))),
        ("seed_position", pa.list_(pa.int64())),
        ("config_digest", pa.string()),
        ("started", pa.timestamp("us", "UTC")),
        ("seconds", pa.float64()),
        ("stored_bytes", pa.int64()),
        ("session", pa.int32()),
        ("versions", pa.map_(pa.string(), pa.string())),
        ("sha256", pa.string()),
    ]
)


def _lineage_row(record: StageRecord) -> dict[str, object]:
    return {
        "sequence": record.sequence,
        **asdict(record.ref),
        "digest": record.digest,
        "inputs": [{**asdict(item.ref), "digest": item.digest} for item in record.inputs],
        "spans": [item.as_dict() for item in record.spans],
        "seed_position": list(record.seed_position),
        "config_digest": record.config_digest,
        "started": datetime.fromisoformat(record.started),
        "seconds": record.seconds,
        "stored_bytes": record.stored_bytes,
        "session": record.session,
        "versions": dict(record.versions),
        "sha256": record.sha256,
    }
