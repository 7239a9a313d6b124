"""Open a run and read what it holds, as tables or one iteration batch by batch.

Nothing is seen before its commit record, and nothing unchecked is decoded.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.shown import Row, Shown, size
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Metrics,
    Minibatches,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.storage.errors import DamagedRun, StageMissing, damaged, system_errors
from metaloom.storage.format.canonical import read_sealed
from metaloom.storage.format.codec import Value
from metaloom.storage.format.places import argument, folder_of, url_of
from metaloom.storage.format.records import read_record
from metaloom.storage.format.segments import Link
from metaloom.storage.format.sessions import newest_session
from metaloom.storage.read.history import chain_problems
from metaloom.storage.read.info import (
    boundaries,
    contributors,
    first_iteration,
    first_sequence,
    first_session,
    origin,
    read_info,
)
from metaloom.storage.read.outputs import Places, Steps, StoredOutputs, places, shape_of_rounds, whole_numbers
from metaloom.storage.read.sessions import ComputedWith, mapping, read_sessions
from metaloom.storage.remote.log import RemoteLog, follow
from metaloom.storage.remote.objects import ObjectFolder

if TYPE_CHECKING:
    import pyarrow as pa
    import xarray as xr

V = TypeVar("V", bound=Value)


@dataclass(frozen=True, repr=False)
class Iteration(Shown):
    """The stored batches of one iteration. Every method raises StageMissing for a missing output."""

    run: StoredOutputs
    index: int

    def shown(self) -> tuple[str, list[Row]]:
        """Stored stages: output of each, its size on disk, and its duration."""
        records = [self.run.record(ref) for ref in self.run.refs() if ref.iteration == self.index]
        rows = [
            (
                str(record.ref),
                f"{len(record.arrays)} arrays",
                "thinned" if self.run.is_thinned(record.ref) else size(record.stored_bytes),
                f"{record.seconds:.3g} s",
            )
            for record in records
        ]
        return f"Iteration {self.index} of {self.run.location}", rows

    def tasks(self, *, task: Places = None) -> TaskBatch:
        """Load the tasks, or some of them by index."""
        return self._load("tasks", 0, TaskBatch, task)

    def memory_fill(self, *, task: Places = None) -> EpisodeBatch:
        """Load the episodes that initially fill the replay buffer. They belong to iteration 0, before its tasks."""
        return self._load("memory_fill", 0, EpisodeBatch, task)

    def rollouts(self, k: int = 0, *, task: Places = None) -> EpisodeBatch:
        """Load the episodes of inner step k: 0 before adaptation, K after it.

        Args:
            k: Inner step.
            task: Indices of tasks; only their parts of the arrays are read. None for all.
        """
        return self._load("rollouts", k, EpisodeBatch, task)

    def samples(self, k: int = 0, *, task: Places = None) -> Samples:
        """Read the processed samples of the episodes of inner step k; `task` as for `rollouts`."""
        return self._load("samples", k, Samples, task)

    def adapted(self, k: int = 0, *, task: Places = None) -> TaskParams:
        """Load every task's parameters after k + 1 inner steps; `task` as for `rollouts`."""
        return self._load("adapted", k, TaskParams, task)

    def minibatches(self) -> Minibatches:
        """Load the row numbers of the transitions that the gradient steps learned from."""
        return self._load("minibatches", 0, Minibatches)

    def transitions(self, update: int = 0, *, context: bool = False, rows: slice = slice(None)) -> "pa.Table":
        """Read the transitions of a gradient step: one row per transition, with the columns of `Run.transitions`.

        Three columns precede them: `place` (index in K), `memory` (task whose replay buffer the row is from) and `n`.

        Args:
            update: Gradient step, from 0.
            context: Read the transitions that tasks were inferred from instead.
            rows: Selection of the K x N transitions; only their batches are read.
        """
        from metaloom.storage.read.transitions import minibatch_table

        return minibatch_table(self.run, self.minibatches(), update, context=context, chosen=rows)

    def learner(self) -> LearnerState:
        """Read the learner that the iteration started from."""
        return self._expect(self.run.files.stages.learner_ref(self.index), Update).learner

    def update(self) -> Update:
        """Read the result of the iteration: the next learner, and the metrics."""
        return self._expect(self.run.files.stages.last_ref(self.index), Update)

    def evaluation(self) -> Evaluation:
        """Read the evaluation of the learner that the iteration led to."""
        return self._load("evaluation", 0, Evaluation)

    def metrics(self) -> Metrics:
        """Load the metrics of the iteration."""
        if not self.run.is_thinned(self.run.last_ref(self.index)):
            return self.update().metrics
        from metaloom.storage.read.frames import read_metrics

        # Of a reference, whose learner went with them: the table has them too.
        (row,) = read_metrics(self.run.files, [self.index]).drop_columns(["iteration"]).to_pylist()
        return {name: value for name, value in row.items() if value is not None}

    def xarray(self, k: int = 0, *, task: Places = None) -> "xr.Dataset":
        """Tasks, episodes and samples of inner step k with named axes and units; tasks as `rollouts` takes them."""
        from metaloom.storage.read.datasets import to_xarray

        self.run.record(ref := self._ref("rollouts", k))
        count, _, _ = shape_of_rounds(self.run.files, self.run.stages.group_of(ref))
        components = {axis: self.run.components(axis) for axis in ("observation", "action")}
        return to_xarray(self.run.files, self.index, k, places(task, count, "task"), components, self.run.facts)

    def _load(self, group: str, step: int, kind: type[V], task: Places = None) -> V:
        return self._expect(self._ref(group, step), kind, task)

    def _ref(self, group: str, step: int) -> StageRef:
        stages = self.run.files.stages
        ref = stages.in_group(group, self.index, step)
        if ref is None:
            raise StageMissing(
                self.run.files.root,
                found=f"none of its stages gives {group}",
                required=f"one of {', '.join(stage.group for stage in stages.stages)}",
                action="`metaloom show RUN` says what its algorithm is",
            )
        return ref

    def _expect(self, ref: StageRef, kind: type[V], task: Places = None) -> V:
        value = self.run.load(ref, task=task)
        if not isinstance(value, kind):
            raise damaged(self.run.files.record_path(ref), f"holds a {type(value).__name__}")
        return value


_LOG = logging.getLogger(__name__)

Iterations = None | int | range | slice | Sequence[int]
"""All complete iterations, one of them (negative: from the end), or some."""


class Run(StoredOutputs):
    """A stored run, read-only. It follows the run while a writer continues."""

    def __init__(self, path: Path, info: Mapping[str, Any], remote: RemoteLog | None = None) -> None:
        super().__init__(path, info, remote)
        self._sessions: dict[str, ComputedWith] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the run in a folder or under a URL, for reading. A writer may continue meanwhile.

        Raises:
            RunNotFound, NotARun: there is no such folder, or it holds no run.
            IncompatibleFormat: the run was written in a format that this version does not read.
            DamagedRun: run.json is damaged, or not the one that the run's records follow.
            StorageFailed: the object store of a URL cannot be read.
        """
        folder = folder_of(path)
        remote = follow(folder)
        run = cls(folder, read_info(folder), remote)
        require_own_records(run)
        known = newest_session(run.path, first_session(run.info))
        head = known.head if known else None
        if known and head and head.sequence not in known.lost and not run.contains(head.ref):
            lost = f"its newest record, of {head.ref} at position {head.sequence} of the history, is missing"
            _LOG.warning("%s: %s; `metaloom verify %s` tells more", run.location, lost, argument(run.path))
        return run

    def __reduce__(self) -> tuple[Any, ...]:
        # What is open is of this process: another one opens the run itself.
        return type(self).open, (self.location if url_of(self.path) else self.path.absolute(),)

    def __repr__(self) -> str:
        count = len(self.iterations)
        return f"Run({self.location!r}, {count} iteration{'' if count == 1 else 's'})"

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.resolve().name

    @property
    def is_sealed(self) -> bool:
        """True if the newest session ended by itself: then the removal of later records is detected.

        A session that was killed, still writes, or is of an earlier version only records what existed when it began.
        """
        newest = newest_session(self.path, first_session(self.info))
        return newest is not None and newest.sealed

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the run was created with."""
        return self.info["config"]

    def config_of(self, ref: StageRef) -> Mapping[str, Any]:
        """Return the configuration that decides an output, stored or not; for a fork's shared outputs the parent's."""
        return origin(self.info, ref)["config"]

    def environment_of(self, ref: StageRef) -> Mapping[str, Any]:
        """Return the environment of a stored output: code, plug-ins, kernel, device.

        Each session records its environment. Earlier versions did not; their outputs get the run's first environment.

        Raises:
            StageMissing: the output is not stored.
        """
        token = self.record(ref).token
        if token not in self._sessions:
            self._sessions = {session.token: session for session in self.sessions()}
        if token in self._sessions:
            return self._sessions[token].environment
        return mapping(origin(self.info, ref).get("environment"))

    def sessions(self) -> list[ComputedWith]:
        """List the sessions that computed outputs, the first one first, if they recorded their environment."""
        return read_sessions(self.path, self.info)

    def __getitem__(self, iteration: int) -> Iteration:
        """Return one iteration, complete or not; a negative number counts from the last complete one.

        Raises:
            StageMissing: the number is beyond the run's target.
        """
        if iteration < 0:
            (iteration,) = self.select(iteration)
        elif iteration >= self.capacity:
            raise self._incomplete(iteration)
        return Iteration(self, iteration)

    def __iter__(self) -> Iterator[Iteration]:
        return (Iteration(self, i) for i in self.iterations)

    def __len__(self) -> int:
        return len(self.iterations)

    def select(self, iterations: Iterations) -> Sequence[int]:
        """Resolve a selection to complete iterations; negative numbers count from the end.

        Raises:
            ValueError: they are not integers.
            StageMissing: one of them is not complete.
        """
        complete = self.iterations
        if iterations is None:
            return complete
        if isinstance(iterations, slice):
            return complete[iterations]
        numbers = whole_numbers(iterations, "iteration")
        found = [i + len(complete) if i < 0 else i for i in numbers]
        for asked, i in zip(numbers, found, strict=True):
            if i not in complete:
                raise self._incomplete(asked)
        return found

    def steps(
        self,
        iterations: Iterations = None,
        columns: Sequence[str] | None = None,
        steps: Steps = None,
        *,
        stage: str | None = None,
        task: Places = None,
        episode: Places = None,
    ) -> "pa.Table":
        """Read one row per real environment step, without padding.

        All rows are in memory at once; `scan_steps` gives the same rows, one inner step of an iteration at a time.

        Args:
            iterations: Iterations to read; None for all complete ones.
            columns: None for all; only what the columns need is read. `observation.NAME` and `action.NAME` are single
                components, where the environment names them, and `observation.*` all of them; `reward_*` are all terms.
            steps: Inner steps k to include; None for all.
            stage: One group of arrays: `rollouts_1`, or `memory_fill` for the initial replay buffer; None for the
                rollouts of all inner steps.
            task: Indices in the meta-batch; only their parts of the arrays are read. Negative ones count from the end.
            episode: Indices among the episodes of each task.

        Raises:
            ValueError: there is no such column, stage, task or episode.
        """
        return self.scan_steps(iterations, columns, steps, stage=stage, task=task, episode=episode).read_all()

    def scan_steps(
        self,
        iterations: Iterations = None,
        columns: Sequence[str] | None = None,
        steps: Steps = None,
        *,
        stage: str | None = None,
        task: Places = None,
        episode: Places = None,
    ) -> "pa.RecordBatchReader":
        """Yield what `steps` gives, one inner step of an iteration at a time, so that memory stays bounded."""
        from metaloom.storage.read.frames import StepFilter, scan_steps

        chosen = StepFilter(self.select(iterations), steps, stage, task, episode)
        components = {axis: self.components(axis) for axis in ("observation", "action")}
        return scan_steps(self.files, chosen, columns, components, self.facts)

    def episodes(
        self, iterations: Iterations = None, steps: Steps = None, *, task: Places = None, episode: Places = None
    ) -> "pa.Table":
        """Read one row per episode: return, length, how it ended, and the parameters of its task as `task_*`.

        Facts of the environment become `fact_*`: for a flag, True if any step has it; for other facts, the value at the
        last step. The selection works as in `steps`.
        """
        from metaloom.storage.read.frames import StepFilter, read_episodes

        return read_episodes(self.files, StepFilter(self.select(iterations), steps, None, task, episode))

    def tasks(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per task with its parameters as `task_*`."""
        return self._table("tasks", iterations)

    def metrics(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per iteration with its metrics."""
        from metaloom.storage.read.frames import read_metrics

        return read_metrics(self.files, self.select(iterations))

    def evaluations(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per episode of the evaluations during training, with its task's parameters as `task_*`."""
        return self._table("evaluations", iterations)

    def transitions(self, rows: "Sequence[int] | Array") -> "pa.Table":
        """Read transitions by row number, as minibatches name them: one row each, with its origin.

        Columns: row, iteration, stage and step (which collected it), task (index in its batch), task_id (in the fixed
        set, -1 without one; null for the fill), episode, t, observation, action, reward,
        next_observation, terminated. Only batches that hold one of the rows are read.

        Raises:
            StageMissing: a row is not stored.
            ValueError: a row number is negative.
        """
        from metaloom.storage.read.transitions import read_transitions

        return read_transitions(self, np.asarray(rows, np.int64))

    def lineage(self) -> "pa.Table":
        """Read one row per stored output, in order of creation: its inputs, time, session and versions."""
        from metaloom.storage.read.frames import lineage

        return lineage(self.record(ref) for ref in self.refs())

    def _table(self, name: str, iterations: Iterations) -> "pa.Table":
        from metaloom.storage.read.frames import read_tables

        return read_tables(self.files, name, self.select(iterations))


def open_run(path: str | Path) -> Run:
    """Open the run in a folder or under a URL, for reading; see Run.open."""
    return Run.open(path)


def run_exists(path: str | Path) -> bool:
    """Return True if there is a run in a folder or under a URL.

    Raises:
        StorageFailed: the folder, or the object store of a URL, cannot be read.
    """
    folder = folder_of(path)
    follow(folder)
    with system_errors(folder, required="a folder that can be read", action="Check its permissions and its disk"):
        return (folder / "run.json").exists()


def require_own_records(run: Run) -> None:
    """Refuse a run.json that was replaced or changed along with its seal: the first records contain its hash."""
    try:
        follows = boundaries(run.info)
        found = [_link_at(run, first_sequence(info), first_iteration(info)) for info in contributors(run.info)]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(run.path / "run.json", "does not say which stages and ancestors the run has") from None
    for problem in chain_problems(run.files, (link for link in found if link is not None), follows):
        raise problem


def _link_at(run: Run, sequence: int, iteration: int) -> Link | None:
    """Read the record at a position, if it is the first of its iteration and readable; else `verify` checks it."""
    sealed = (link for segment in run.files.segments.all() for link in segment.seal.links)
    if packed := next((link for link in sealed if link.first == sequence), None):
        return packed
    refs = [run.learner_ref(0), *(StageRef(iteration, stage.name) for stage in run.stages.stages)]
    for ref in refs:
        try:
            record = read_record(run.files.record_path(ref))
        except (FileNotFoundError, DamagedRun):
            continue
        if record.sequence == sequence:
            return Link.of(record)
    return None


def find_runs(root: Path) -> list[Path]:
    """Find the folders of the runs below the folder of all runs, the newest first.

    A run that cannot be read is one of them, for whoever opens it to say why.

    Raises:
        StorageFailed: the object store cannot be read.
    """
    url = url_of(root)
    if url is None:
        folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
        written = {folder: when for folder in folders if (when := _written(folder)) is not None}
        return sorted(written, key=lambda folder: written[folder], reverse=True)
    folders = (folder_of(f"{url}/{name}") for name in ObjectFolder(url).folders())
    created = {folder: when for folder in folders if (when := _created(folder)) is not None}
    return sorted(created, key=lambda folder: created[folder], reverse=True)


def _written(folder: Path) -> float | None:
    """Modification time of a run's run.json, of the folder if another user keeps us out; None if it is no run."""
    try:
        return (folder / "run.json").stat().st_mtime
    except PermissionError:
        return folder.stat().st_mtime
    except OSError:
        return None


def _created(folder: Path) -> str | None:
    """Return the time of creation of the run that a folder caches; None if there is none, "" if it cannot be read."""
    try:
        follow(folder)
        return str(read_sealed(folder / "run.json", indented=True).get("created", ""))
    except FileNotFoundError:
        return None
    except DamagedRun:
        return ""
