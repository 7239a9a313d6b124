"""Publication of a stage's output: its files, then its record. Runs in the writer's background thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.types import EACH_EPISODE, EpisodeBatch, Evaluation, TaskBatch, Update
from metaloom.storage.errors import LayoutMismatch, StageExists
from metaloom.storage.format.codec import Piece, Value, array_digests, flatten, output_digest
from metaloom.storage.format.places import argument
from metaloom.storage.format.provenance import utc, versions
from metaloom.storage.format.records import Input, SpanInput, StageRecord, StoredFile
from metaloom.storage.read.committed import CommittedFiles, table_path
from metaloom.storage.read.history import RecordChain, SpanSums
from metaloom.storage.read.info import origin
from metaloom.storage.read.tables import FACTS, Columns, episode_columns, evaluation_file, iteration_tables
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.sessions import Session


@dataclass(frozen=True)
class Output:
    """Output waiting to be published."""

    ref: StageRef
    value: Value
    pieces: tuple[Piece, ...]
    inputs: tuple[StageRef | Span, ...]
    seed_position: tuple[int, ...]
    started: float
    seconds: float


class Publisher:
    """Publisher that writes and commits stage outputs one at a time, with the tables derived from them."""

    def __init__(
        self, files: CommittedFiles, session: Session, arrays: ArrayStore, history: RecordChain, info: Mapping[str, Any]
    ) -> None:
        self._files = files
        self._session = session
        self._arrays = arrays
        self._history = history
        self._info = info
        self._tasks: dict[int, TaskBatch] = {}
        self._episodes: dict[StageRef, Columns] = {}
        self._spans: SpanSums | None = None

    def publish(self, output: Output) -> int:
        """Publish an output: write its data durably, then its record; return the number of bytes written."""
        if isinstance(output.value, TaskBatch):
            self._tasks = {output.ref.iteration: output.value}
        if isinstance(output.value, EpisodeBatch) and output.ref.stage == self._files.stages.named("rollouts"):
            self._episodes[output.ref] = episode_columns(flatten(output.value))
        try:
            chunks = self._arrays.write(output.pieces)
        except LayoutMismatch as problem:
            where = f"{argument(self._files.root)}: {output.ref.where}: {problem.where}"
            said = {"found": problem.found, "required": problem.required, "action": problem.action}
            raise LayoutMismatch(where, **said) from None
        tables = self._write_tables(output)
        record = self._record(output, chunks, tables)
        try:
            content = record.content()
            self._session.publish(content, self._files.record_path(output.ref))
        except FileExistsError:
            raise StageExists(
                self._files.record_path(output.ref),
                found="a record that appeared while this writer held the run",
                required="no other writer",
                action="Stop all writers of the run, then resume it",
            ) from None
        self._session.share()
        self._history.append(record)
        if self._spans is not None:
            self._spans.add(record.ref, record.digest)
        return record.stored_bytes + len(content)

    def _record(self, output: Output, chunks: tuple[StoredFile, ...], tables: tuple[StoredFile, ...]) -> StageRecord:
        arrays = array_digests(output.value)
        return StageRecord(
            ref=output.ref,
            sequence=self._history.next_sequence,
            session=self._session.number,
            token=self._session.token,
            inputs=tuple(Input(r, self._history.digests[r]) for r in output.inputs if isinstance(r, StageRef)),
            spans=tuple(self._summed(span) for span in output.inputs if isinstance(span, Span)),
            seed_position=output.seed_position,
            config_digest=str(origin(self._info, output.ref)["config_digest"]),
            chunks=chunks,
            tables=tables,
            arrays=arrays,
            digest=output_digest({name: entry.sha256 for name, entry in arrays.items()}),
            versions=versions(),
            started=utc(output.started),
            seconds=output.seconds,
            previous=self._history.last_hash,
        ).with_hash()

    def _summed(self, span: Span) -> SpanInput:
        if self._spans is None:
            self._spans = SpanSums(self._num_steps)
            for ref in self._history.digests:
                self._spans.add(ref, self._history.digests[ref])
        found = self._spans.of(span)
        assert found is not None, f"`put` has checked that {span} is stored"
        return found

    def _num_steps(self, ref: StageRef) -> int:
        if ref in self._episodes:
            return int(self._episodes[ref]["length"].sum())
        # The output is from an earlier session, or is the initial fill of the replay buffer.
        record = self._files.record(ref)
        if "lengths" not in record.arrays:
            return 0
        if self._files.is_thinned(record):
            # Imports pyarrow, which opening a run does not need.
            from metaloom.storage.read.frames import num_tabled_steps

            return num_tabled_steps(self._files, ref)
        return int(self._files.read_lengths(record).sum())

    def _write_tables(self, output: Output) -> tuple[StoredFile, ...]:
        if isinstance(output.value, Evaluation):
            raw = evaluation_file(output.ref.iteration, output.value)
            return self._arrays.write_tables({table_path("evaluations", output.ref.iteration): raw})
        if output.ref.stage != self._files.stages.last or not isinstance(output.value, Update):
            return ()
        iteration, stages = output.ref.iteration, self._files.stages
        tasks = stages.in_group("tasks", iteration)
        if tasks is not None and iteration not in self._tasks and tasks in self._history.digests:
            value = self._files.read_value(self._files.record(tasks))
            if isinstance(value, TaskBatch):
                self._tasks = {iteration: value}
        rounds = [ref for ref in self._history.digests.of(iteration) if ref.stage == stages.named("rollouts")]
        by_step = {ref.step: self._summary(ref) for ref in stages.sort(rounds)}
        tables = iteration_tables(iteration, self._tasks.get(iteration), by_step, output.value.metrics)
        self._episodes.clear()
        return self._arrays.write_tables({table_path(name, iteration): raw for name, raw in tables.items()})

    def _summary(self, ref: StageRef) -> Columns:
        # If an earlier session collected the episodes, they are only on disk.
        if ref not in self._episodes:
            record = self._files.record(ref)
            facts = {name for chunk in record.chunks if (name := chunk.array.partition("/")[2]).startswith(FACTS)}
            (stored,) = self._files.read_arrays(record, {"rewards", *EACH_EPISODE, *facts}).values()
            self._episodes[ref] = episode_columns({name: array for name, (array, _) in stored.items()})
        return self._episodes[ref]
