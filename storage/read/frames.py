"""Stored batches as Arrow tables, with one row per step, episode, task, iteration or record."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import groupby, takewhile
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import EACH_EPISODE, Array
from metaloom.storage.errors import DamagedRun, IncompatibleFormat, StageMissing, damaged
from metaloom.storage.format.columns import column, column_type
from metaloom.storage.format.places import argument
from metaloom.storage.format.records import StageRecord
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.outputs import Places, Steps, StoredOutputs, chosen_steps, places
from metaloom.storage.read.parquet import parse_table
from metaloom.storage.read.segments import Segment

_POSITION = ("iteration", "step", "task", "episode", "t")
_NAMES = {"observations": "observation", "actions": "action", "rewards": "reward"}
_ADJUSTED = "adjusted_rewards"  # only with DiCE
_SAMPLE_NAMES = {"returns": "return", "values": "value", "advantages": "advantage", _ADJUSTED: "adjusted_reward"}


@dataclass(frozen=True)
class _Source:
    """Source of a column in the steps table: an array, or one component of its vectors."""

    array: str
    kind: pa.DataType
    at_end: bool = False  # True for a per-episode flag, which is set only in the episode's last step
    component: int | None = None
    about: Mapping[str, str] = field(default_factory=dict[str, str])


def scan_steps(
    run: StoredOutputs,
    iterations: Sequence[int],
    columns: Sequence[str] | None,
    steps: Steps,
    *,
    stage: str | None,
    task: Places,
    episode: Places,
) -> pa.RecordBatchReader:
    """Return a reader of one row per real step of a selection, one record batch per rollout batch; see `Run.steps`."""
    files = run.files
    batches = _batches(files, stage)
    sources = _step_sources(files, batches)
    sources |= {
        name: replace(sources[name], about={"unit": unit})
        for fact, unit in run.facts.items()
        if (name := f"fact_{fact}") in sources
    }
    known = (*_POSITION, *sources)
    vectors = ((vector, run.components(vector)) for vector in ("observation", "action"))
    single = {vector: _components(vector, sources, units) for vector, units in vectors if units}
    names = known if columns is None else tuple(c for column in columns for c in _expanded(column, single, known))
    sources |= {name: source for parts in single.values() for name, source in parts.items()}
    if unknown := [name for name in names if name not in (*_POSITION, *sources)]:
        more = "".join(f", and {next(iter(parts))} ... {vector}.*" for vector, parts in single.items() if parts)
        raise ValueError(f"steps have no columns {unknown}; the columns are {', '.join(known)}{more}")
    fields = [(n, s.kind, s.about) if (s := sources.get(n)) else (n, pa.int32(), {}) for n in names]
    schema = pa.schema([pa.field(name, kind, metadata=dict(about) or None) for name, kind, about in fields])
    some = {*iterations}
    wanted = [_Rows.of_round(files, ref, task, episode) for ref in batches if ref.iteration in some]
    chosen = _known_steps(steps, batches)
    rounds = [rows for rows in wanted if chosen is None or rows.ref.step in chosen]
    return pa.RecordBatchReader.from_batches(schema, (_step_rows(files, rows, sources, schema) for rows in rounds))


def _batches(files: CommittedFiles, stage: str | None) -> list[StageRef]:
    """Return a group's stored batches of episodes, or all rollout batches if `stage` is None."""
    refs, stages = files.stages.sort(files.refs()), files.stages
    if stage is None:
        return [ref for ref in refs if ref.stage == stages.named("rollouts")]
    groups = [stages.group_of(ref) for ref in refs if stages[ref.stage].output == "EpisodeBatch"]
    if stage not in groups:
        raise ValueError(f"no rollouts stored as {stage!r}; stored so far: {', '.join(sorted({*groups})) or 'none'}")
    return [ref for ref in refs if stages.group_of(ref) == stage]


def _known_steps(chosen: Steps, batches: Sequence[StageRef]) -> list[int] | None:
    """Return the selected inner steps after checking that each exists in some iteration; None for all."""
    steps, known = chosen_steps(chosen), sorted({ref.step for ref in batches})
    if unknown := [step for step in steps or () if step not in known]:
        raise ValueError(f"no inner step {unknown[0]}; choose one of {', '.join(map(str, known))}")
    return steps


def read_episodes(
    files: CommittedFiles, iterations: Sequence[int], steps: Steps, task: Places, episode: Places
) -> pa.Table:
    """Read the selected rows of the episodes table. Raises ValueError for an unknown inner step, task or episode."""
    table = read_tables(files, "episodes", iterations)
    if not (batches := _batches(files, None)):
        raise IncompatibleFormat(
            files.root / "run.json",
            found="no stage that stores rollouts, though the run has an episodes table",
            required="a stage that stores rollouts",
            action="Restore run.json from a copy of the run",
        )
    B, E, _ = files.spec(f"{files.stages.group_of(batches[0])}/rewards").shape
    of_columns = {
        "step": _known_steps(steps, batches),
        "task": None if task is None else places(task, B, "task"),
        "episode": None if episode is None else places(episode, E, "episode"),
    }
    for name, wanted in of_columns.items():
        if wanted is not None:
            table = table.filter(pc.field(name).isin(wanted))
    return table


def num_tabled_steps(files: CommittedFiles, ref: StageRef) -> int:
    """Return the number of real steps in a rollout batch, from the episodes table, which thinning keeps."""
    episodes = read_tables(files, "episodes", [ref.iteration])
    steps, lengths = (episodes[name].to_numpy() for name in ("step", "length"))
    return int(lengths[steps == ref.step].sum())


def read_tables(files: CommittedFiles, name: str, iterations: Sequence[int]) -> pa.Table:
    """Read a derived table's rows for the given iterations. Raises StageMissing if there are none."""
    parts: list[pa.Table] = []
    for part, of_part in _by_segment(files, name, iterations or range(1)):
        if part is None:
            parts += [table for iteration in of_part for table in _live_parts(files, name, iteration)]
        elif part.num_rows:
            parts.append(part)
    if not parts and iterations and name == "evaluations":
        raise StageMissing(
            files.root,
            found="no evaluation of these iterations is stored",
            required="iterations evaluated in training, as set by evaluation.every",
            action=f"`metaloom evaluate {argument(files.root)}` evaluates it now",
        )
    if not parts:
        raise _nothing(files, f"no table of {name}")
    try:
        table = pa.concat_tables(parts, promote_options="default")
    except pa.ArrowException as error:
        raise damaged(files.root / "tables", f"has tables of {name} with different schemas ({error})") from None
    return table if iterations else table[:0]


def read_metrics(files: CommittedFiles, iterations: Sequence[int]) -> pa.Table:
    """Read one row of metrics per iteration. Raises StageMissing if the run has no complete iteration.

    If a fork has other metrics than its parent, the table has a column for each, null in the other's iterations.
    """
    table = _metrics_of(files, iterations)
    if firsts := files.stages.metrics_since:
        stored = [i for i in (0, *firsts) if files.contains(files.stages.last_ref(i))]
        schema = pa.unify_schemas([table.schema, *(_metrics_of(files, [i]).schema for i in stored)])
        names = ["iteration", *sorted({*schema.names} - {"iteration"})]
        table = pa.concat_tables([schema.empty_table(), table], promote_options="default").select(names)
    return table.combine_chunks()


def _metrics_of(files: CommittedFiles, iterations: Sequence[int]) -> pa.Table:
    """Read one row per iteration, as `read_metrics` does, with the metrics of these iterations only.

    Arrays are read rather than tables, because opening a Parquet file takes longer than reading its only row.
    """
    # For segments, read the tables, which contain a row per iteration.
    parts: list[pa.Table] = []
    for part, of_part in _by_segment(files, "metrics", iterations or range(1)):
        parts += _live_metrics(files, of_part) if part is None else [part]
    if not parts:
        raise _nothing(files, "no table of metrics")
    table = pa.concat_tables(parts, promote_options="default")
    return table if iterations else table[:0]


def lineage(records: Iterable[StageRecord]) -> pa.Table:
    """Return a table with one row per record, in the order of publication."""
    rows: list[dict[str, object]] = [
        {
            **vars(record),
            **asdict(record.ref),
            "inputs": [{**asdict(item.ref), "digest": item.digest} for item in record.inputs],
            "spans": [item.as_dict() for item in record.spans],
            "started": datetime.fromisoformat(record.started),
            "stored_bytes": record.stored_bytes,
        }
        for record in sorted(records, key=lambda record: record.sequence)
    ]
    return pa.Table.from_pylist(rows, schema=_LINEAGE)


_OF_STEPS = ("task", "episode", "t")


def read_entries(files: CommittedFiles, refs: Iterable[StageRef], columns: Sequence[str] | None) -> pa.Table:
    """Read one stage's outputs as a table: `iteration`, `step`, the index along each shared axis, and the arrays.

    Shared axes are the leading axes common to all columns; further axes become lists. Padding is omitted. Raises
    ValueError if a column does not exist or the outputs have different shapes.
    """
    tables = [_entries(files, ref, columns) for ref in refs]
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as problem:
        raise ValueError(f"these outputs do not fit into one table ({problem}); read fewer inner steps") from None


def _entries(files: CommittedFiles, ref: StageRef, columns: Sequence[str] | None) -> pa.Table:
    record, group = files.record(ref), files.stages.group_of(ref)
    paths = [chunk.array for chunk in record.chunks]
    specs = {name: files.spec(path) for path in paths for folder, _, name in [path.partition("/")] if folder == group}
    names = [name for column in columns or specs for name in _expanded(column, {}, specs)]
    if unknown := [name for name in names if name not in specs]:
        raise ValueError(f"{ref} has no column {unknown[0]}; available columns: {', '.join(specs)}")
    chosen = {name: specs[name] for name in names}
    arrays = {name: data for name, (data, _) in files.read_arrays(record, [*chosen])[group].items()}
    leading = zip(*(spec.dims[1:] for spec in chosen.values()), strict=False)
    shared = tuple(axes[0] for axes in takewhile(lambda axes: len({*axes}) == 1, leading))
    sizes = next(iter(arrays.values())).shape[: len(shared)] if arrays else ()
    real = _real_steps(files, ref, sizes) if shared[:3] == _OF_STEPS else np.ones(sizes, np.bool_)
    if shared[3:]:
        real = np.broadcast_to(real.reshape(*real.shape, *[1] * (len(sizes) - real.ndim)), sizes)
    index = np.argwhere(real).astype(np.int32)
    position = {"iteration": ref.iteration, "step": ref.step}
    found = {name: column(np.full(len(index), n, np.int32)) for name, n in position.items()}
    found |= {axis: column(index[:, n].copy()) for n, axis in enumerate(shared)}
    found |= {name: column(arrays[name][real]) for name in chosen}
    units = {name: {"unit": str(spec.attributes["unit"])} for name, spec in chosen.items() if "unit" in spec.attributes}
    return pa.table(found, pa.schema([pa.field(name, a.type, metadata=units.get(name)) for name, a in found.items()]))


def _real_steps(files: CommittedFiles, ref: StageRef, sizes: Sequence[int]) -> Array:
    """Return a mask of the real steps in an inner step's rollouts; all True if the axis sizes differ."""
    episodes = read_tables(files, "episodes", [ref.iteration])
    step, *places = (episodes[name].to_numpy() for name in ("step", "task", "episode", "length"))
    task, episode, length = (values[step == ref.step] for values in places)
    if not (len(task) and task.max() < sizes[0] and episode.max() < sizes[1] and length.max() <= sizes[2]):
        return np.ones(sizes, np.bool_)
    lengths = np.zeros(sizes[:2], np.int32)
    lengths[task, episode] = length
    return np.arange(sizes[2]) < lengths[..., None]


def _step_sources(files: CommittedFiles, batches: Sequence[StageRef]) -> dict[str, _Source]:
    if not batches:
        raise _nothing(files, "no rollouts")
    first = files.record(batches[0])
    sources: dict[str, _Source] = {}
    per_step = files.spec(f"{files.stages.group_of(batches[0])}/rewards").shape
    for path in sorted((chunk.array for chunk in first.chunks), key=_column_order):
        array = path.partition("/")[2]
        spec = files.spec(path)
        # Per-episode and per-task arrays, such as log_std, are not columns of steps. Check the axis names first: a
        # per-episode vector can be as long as the episode. Some arrays have no axis names.
        axis = spec.dims[3] if len(spec.dims) > 3 else ""
        is_per_step = (axis == "t" or axis.endswith("_axis_2")) and spec.shape[:3] == per_step
        if (name := _column_name(array)) and (array == "observations" or is_per_step):
            size = int(np.prod(spec.shape[3:])) if len(spec.shape) > 3 else None
            sources[name] = _Source(array, column_type(np.dtype(spec.dtype), size))
    stored = {chunk.array.partition("/")[2] for chunk in first.chunks}
    ends = {
        name: _Source(name, pa.bool_(), at_end=True)
        for name, dtype in EACH_EPISODE.items()
        if dtype is np.bool_ and name in stored
    }
    if not files.stages.named("samples"):  # off-policy runs have no samples
        return sources | ends
    # Determine columns from the folder, so that a damaged record of samples does not hide the rollouts.
    adjusted = (files.data / "samples_0" / _ADJUSTED).is_dir()
    names = _SAMPLE_NAMES.items()
    return sources | {name: _Source(a, pa.float32()) for a, name in names if adjusted or a != _ADJUSTED} | ends


def _column_name(array: str) -> str | None:
    kind, _, name = array.partition(".")
    if kind == "behavior":
        return name
    prefix = {"reward_terms": "reward", "facts": "fact"}.get(kind)
    return f"{prefix}_{name}" if prefix else _NAMES.get(array)


def _column_order(path: str) -> tuple[int, str]:
    kinds = ("observations", "actions", "behavior", "rewards", "reward_terms", "facts")
    kind = path.partition("/")[2].partition(".")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), path)


def _components(vector: str, sources: Mapping[str, _Source], units: Mapping[str, str]) -> dict[str, _Source]:
    """Return a column per component of a vector, or none if the number of components does not match."""
    whole = sources.get(vector)
    if whole is None or not (pa.types.is_fixed_size_list(whole.kind) and whole.kind.list_size == len(units)):
        return {}
    return {
        f"{vector}.{name}": replace(whole, kind=whole.kind.value_type, component=i, about={"unit": unit})
        for i, (name, unit) in enumerate(units.items())
    }


def _expanded(column: str, single: Mapping[str, Mapping[str, _Source]], known: Iterable[str]) -> Iterable[str]:
    if column.endswith(".*") and (parts := single.get(column[:-2])):
        return parts
    # For example, reward_* selects all reward terms.
    return [name for name in known if column.endswith(("_*", ".*")) and name.startswith(column[:-1])] or (column,)


def _step_rows(files: CommittedFiles, round: "_Rows", sources: dict[str, _Source], schema: pa.Schema) -> pa.RecordBatch:
    ref = round.ref
    wanted = {sources[name].array for name in schema.names if name in sources}
    arrays = _arrays(files, ref, wanted | {"lengths"}, round.tasks)
    samples = files.stages.in_group("samples", ref.iteration, ref.step)
    if samples and wanted & {*_SAMPLE_NAMES} and files.contains(samples):
        arrays |= _arrays(files, samples, wanted, round.tasks)
    if [*round.episodes] != [*range(arrays["lengths"].shape[1])]:
        arrays = {name: array[:, round.episodes] for name, array in arrays.items()}
    rows = replace(round, lengths=arrays["lengths"])
    columns: list[pa.Array] = []
    for name in schema.names:
        if name in _POSITION:
            columns.append(column(rows.position(name)))
            continue
        source = sources[name]
        if source.array not in arrays:  # episodes without samples
            columns.append(pa.nulls(rows.count, schema.field(name).type))
            continue
        array = arrays[source.array]
        if source.component is not None:
            array = array[..., source.component]
        columns.append(column(rows.at_end(array) if source.at_end else rows.of(array)))
    return pa.record_batch(columns, schema=schema)


@dataclass(frozen=True)
class _Rows:
    """Real steps of selected tasks and episodes of a batch, in the order task, episode, t."""

    ref: StageRef
    tasks: Sequence[int]
    episodes: Sequence[int]
    T: int  # maximum number of steps in an episode
    lengths: Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [tasks, episodes], once read

    @classmethod
    def of_round(cls, files: CommittedFiles, ref: StageRef, task: Places, episode: Places) -> "_Rows":
        B, E, T = files.spec(f"{files.stages.group_of(ref)}/rewards").shape
        return cls(ref, places(task, B, "task"), places(episode, E, "episode"), T)

    @property
    def count(self) -> int:
        return int(self.lengths.sum())

    def of(self, values: Array) -> Array:
        """Return the entries [n, ...] of an array [B, E, T or T+1, ...] that belong to real steps."""
        if self.count == self.lengths.size * self.T:
            return values[:, :, : self.T].reshape(-1, *values.shape[3:])
        return values[:, :, : self.T][np.arange(self.T) < self.lengths[..., None]]

    def at_end(self, flags: Array) -> Array:
        """Convert per-episode flags [B, E] to per-step flags, set only in the last step of each episode."""
        last = np.arange(self.T) == self.lengths[..., None] - 1
        return self.of(last & flags[..., None])

    def position(self, name: str) -> Array:
        if name in ("iteration", "step"):
            return np.full(self.count, getattr(self.ref, name), np.int32)
        B, E = self.lengths.shape
        numbers, shape = {
            "task": (self.tasks, (B, 1, 1)),
            "episode": (self.episodes, (1, E, 1)),
            "t": (range(self.T), (1, 1, self.T)),
        }[name]
        return self.of(np.broadcast_to(np.array(numbers, np.int32).reshape(shape), (B, E, self.T)))


def _arrays(files: CommittedFiles, ref: StageRef, names: Collection[str], tasks: Sequence[int]) -> dict[str, Array]:
    groups = files.read_arrays(files.record(ref), names, tasks)
    return {name: data for arrays in groups.values() for name, (data, _) in arrays.items()}


def _live_metrics(files: CommittedFiles, iterations: Sequence[int]) -> list[pa.Table]:
    found: list[tuple[Sequence[str], int, Array]] = []
    if any(files.stages.last_ref(i) in files.thinned(i) for i in iterations):  # metrics were removed with the learner
        return [part for i in iterations for part in _live_parts(files, "metrics", i)]
    for i in (i for i in iterations if files.contains(files.stages.last_ref(i))):
        record = files.record(files.stages.last_ref(i))
        for chunk in (chunk for chunk in record.chunks if chunk.array == files.stages.metrics_array(i)):
            values, attributes = files.read_row(record, chunk)
            found.append((attributes["names"], i, values))
    parts: list[pa.Table] = []
    for names, group in groupby(found, key=itemgetter(0)):
        _, numbers, rows = zip(*group, strict=True)
        arrays = zip(["iteration", *names], [np.array(numbers, np.int32), *np.stack(rows).T.copy()], strict=True)
        parts.append(pa.table({name: column(array) for name, array in arrays}))
    return parts


def _by_segment(
    files: CommittedFiles, name: str, iterations: Sequence[int]
) -> Iterator[tuple[pa.Table | None, Sequence[int]]]:
    """Split iterations by segment; for each, yield its table's rows (None outside segments) and the iterations."""
    files.segments.all(refresh=True)
    stages = files.table_stages(name)

    def holder(iteration: int) -> Segment | None:
        return next((s for stage in stages if (s := files.segments.holding(StageRef(iteration, stage)))), None)

    for segment, group in groupby(iterations, holder):
        part = [*group]
        try:
            table = segment.table(name) if segment else None
        except FileNotFoundError:  # unpacked in the meantime
            files.segments.all(refresh=True)
            table = None
        yield (None if table is None else _rows_of(table, part)), part


def _rows_of(table: pa.Table, iterations: Sequence[int]) -> pa.Table:
    """Return a packed table's rows for the given iterations, in order."""
    numbers = table.column("iteration").to_numpy()
    first, last = numbers.searchsorted(iterations), numbers.searchsorted(iterations, side="right")
    if all(np.diff(iterations) == 1):
        return table.slice(first[0], last[-1] - first[0])
    return table.take(np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]))


def _live_parts(files: CommittedFiles, name: str, iteration: int) -> list[pa.Table]:
    refs = (StageRef(iteration, stage) for stage in files.table_stages(name))
    try:
        return [
            parse_table(files.read_bytes(record, file), files.root / file.path)
            for record in (files.record(ref) for ref in refs if files.contains(ref))
            for file in record.tables
            if file.path.split("/")[1] == name
        ]
    except DamagedRun:
        packed = [part for part, _ in _by_segment(files, name, [iteration]) if part is not None]
        if not packed:
            raise
        return packed  # packed since the lookup


def _nothing(files: CommittedFiles, found: str) -> StageMissing:
    return StageMissing(
        files.root,
        found=found,
        required="a run with a complete iteration",
        action=f"`metaloom resume {argument(files.root)}` computes one",
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
