"""Reading runs as tables or by iteration. Outputs are visible once committed, and are checked before decoding."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from metaloom.storage.format.codec import Value
from metaloom.storage.format.files import read_sealed
from metaloom.storage.format.places import argument, folder_of, url_of
from metaloom.storage.format.sessions import newest_session
from metaloom.storage.read import late
from metaloom.storage.read.history import require_own_records
from metaloom.storage.read.info import ComputedWith, first_session, mapping, origin, read_info, read_sessions
from metaloom.storage.read.outputs import Places, Steps, StoredOutputs, chosen_steps, whole_numbers
from metaloom.storage.remote.log import RemoteLog, follow
from metaloom.storage.remote.objects import ObjectFolder

if TYPE_CHECKING:
    import pyarrow as pa
    import xarray as xr

V = TypeVar("V", bound=Value)


@dataclass(frozen=True, repr=False)
class Iteration(Shown):
    """Stored batches of one iteration. Every method raises StageMissing if the output is not stored.

    Other stages are methods too, named after the stage or its group: `run[3].noise(0)`.
    """

    run: StoredOutputs
    index: int

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name in ("run", "index"):  # the object is under construction
            raise AttributeError(name)
        if not self._stage_of(name):
            known = [stage.name for stage in self.run.stages.stages]
            raise AttributeError(f"an iteration has no {name!r}; the stages of the run are {', '.join(known)}")
        return partial(self.output, name)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(stage.name for stage in self.run.stages.stages)]

    def output(self, stage: str, k: int = 0, *, task: Places = None) -> Any:
        """Load the output of any stage, given its name or its group's; `task` selects tasks as in `rollouts`."""
        return self.run.load(self.ref(stage, k), task=task)

    def shown(self) -> tuple[str, list[Row]]:
        """Return a title, and table rows with the size on disk and duration of each stored output."""
        rows: list[Row] = []
        for record in map(self.run.record, self.run.refs_of([self.index])):
            stored = "thinned" if self.run.is_thinned(record.ref) else size(record.stored_bytes)
            rows.append((str(record.ref), f"{len(record.arrays)} arrays", stored, f"{record.seconds:.3g} s"))
        return f"Iteration {self.index} of {self.run.location}", rows

    def tasks(self, *, task: Places = None) -> TaskBatch:
        """Load the iteration's tasks, or only the tasks at the given indices."""
        return self._load("tasks", 0, TaskBatch, task)

    def memory_fill(self, *, task: Places = None) -> EpisodeBatch:
        """Load the episodes that initially filled the replay buffer, which belong to iteration 0."""
        return self._load("memory_fill", 0, EpisodeBatch, task)

    def rollouts(self, k: int = 0, *, task: Places = None) -> EpisodeBatch:
        """Load the episodes of inner step k: 0 before adaptation, K after it.

        `task` selects tasks by index; only these tasks are read from the arrays.
        """
        return self._load("rollouts", k, EpisodeBatch, task)

    def samples(self, k: int = 0, *, task: Places = None) -> Samples:
        """Load the samples of inner step k computed by `process_samples`; `task` selects tasks as in `rollouts`.

        Warns if the iteration learned from samples that another stage computed.
        """
        self._warn_of_other_samples(self.ref("samples", k))
        return self._load("samples", k, Samples, task)

    def adapted(self, k: int = 0, *, task: Places = None) -> TaskParams:
        """Load each task's parameters after k + 1 inner steps; `task` selects tasks as in `rollouts`."""
        return self._load("adapted", k, TaskParams, task)

    def minibatches(self) -> Minibatches:
        """Load the row indices of the transitions used in the gradient steps."""
        return self._load("minibatches", 0, Minibatches)

    def transitions(self, update: int = 0, *, context: bool = False, rows: slice = slice(None)) -> "pa.Table":
        """Read the transitions of a gradient step: one row per transition, with the columns of `Run.transitions`.

        Three columns come first: `place` (0 ... K-1), `memory` (task whose replay buffer the row is from) and `n`.

        Args:
            update: Gradient step, from 0.
            context: True to read the transitions for task inference instead.
            rows: Slice of the K x N transitions; only the batches that contain them are read.
        """
        return late.minibatch_table(self.run, self.minibatches(), update, context=context, chosen=rows)

    def learner(self) -> LearnerState:
        """Load the learner that the iteration started from."""
        return self._expect(self.run.files.stages.learner_ref(self.index), Update).learner

    def update(self) -> Update:
        """Load the iteration's result: the next learner and the metrics."""
        return self._expect(self.run.files.stages.last_ref(self.index), Update)

    def evaluation(self) -> Evaluation:
        """Load the evaluation of the next learner."""
        return self._load("evaluation", 0, Evaluation)

    def metrics(self) -> Metrics:
        """Load the metrics of the iteration."""
        if not self.run.is_thinned(self.run.last_ref(self.index)):
            return self.update().metrics
        # Reference runs remove the metrics together with the learner, so read the table.
        (row,) = late.read_metrics(self.run.files, [self.index]).drop_columns(["iteration"]).to_pylist()
        return {name: value for name, value in row.items() if value is not None}

    def xarray(self, k: int = 0, *, stage: str | None = None, task: Places = None) -> "xr.Dataset":
        """Read the tasks, episodes and samples of inner step k as a dataset with named axes and units.

        With `stage`, read this stage's output instead of episodes and samples; `task` selects tasks as in `rollouts`.
        """
        ref = self.ref(stage or "rollouts", k)
        chosen, samples = self.run.chosen_tasks(self.run.record(ref), task), self._in("samples", k)
        refs = [ref] if stage or samples is None else [ref, samples]
        return late.to_xarray(self.run, refs, self._in("tasks"), chosen)

    def ref(self, stage: str, k: int = 0) -> StageRef:
        """Return a reference to the output of a stage, given by its name or its group's name, whether stored or not."""
        if not (name := self._stage_of(stage)):
            raise StageMissing(
                self.run.files.root,
                found=f"none of its stages outputs {stage}",
                required=f"one of {', '.join(f'{known.group} ({known.name})' for known in self.run.stages.stages)}",
                action="`metaloom show RUN` shows its algorithm",
            )
        return StageRef(self.index, name, k)

    def _stage_of(self, name: str) -> str:
        stages = self.run.files.stages
        return stages.named(name) or (name if name in stages else "")

    def _in(self, group: str, k: int = 0) -> StageRef | None:
        ref = self.run.files.stages.in_group(group, self.index, k)
        return None if ref is None or not self.run.contains(ref) else ref

    def _load(self, group: str, step: int, kind: type[V], task: Places = None) -> V:
        return self._expect(self.ref(group, step), kind, task)

    def _warn_of_other_samples(self, ref: StageRef) -> None:
        stages = self.run.files.stages
        others = {stage.name for stage in stages.stages if stage.output == "Samples"} - {ref.stage}
        if not others:
            return
        readers = [reader for reader in self.run.refs_of({self.index}) if reader.stage not in others]
        read = {item.ref for reader in readers for item in self.run.record(reader).inputs}
        instead = [other for other in stages.sort(read) if other.stage in others and other.step == ref.step]
        if instead and ref not in read:
            _LOG.warning(
                "%s: the iteration learned from %s, not from the returned %s; run[%d].%s(%d) reads the samples it "
                "learned from",
                *(self.run.location, instead[0], ref, self.index, instead[0].stage, ref.step),
            )

    def _expect(self, ref: StageRef, kind: type[V], task: Places = None) -> V:
        value = self.run.load(ref, task=task)
        if not isinstance(value, kind):
            raise damaged(self.run.files.record_path(ref), f"holds a {type(value).__name__}")
        return value


_LOG = logging.getLogger(__name__)

Iterations = None | int | range | slice | Sequence[int]
"""Selection of complete iterations: None for all, one index (negative: from the end), or several."""


class Run(StoredOutputs):
    """A stored run, opened for reading. New outputs appear while a writer adds to it."""

    def __init__(self, path: Path, info: Mapping[str, Any], remote: RemoteLog | None = None) -> None:
        super().__init__(path, info, remote)
        self._sessions: dict[str, ComputedWith] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run in a folder or at a URL for reading, even while it is being written.

        Raises:
            RunNotFound, NotARun: the folder does not exist, or is not a run.
            IncompatibleFormat: the run was written in a format that this version cannot read.
            DamagedRun: run.json is damaged, or does not match the records.
            StorageFailed: the object store of a URL cannot be read.
        """
        folder = folder_of(path)
        remote = follow(folder)
        run = cls(folder, read_info(folder), remote)
        require_own_records(run.files, run.info)
        known = newest_session(run.path, first_session(run.info))
        head = known.head if known else None
        if known and head and head.sequence not in known.lost and not run.contains(head.ref):
            lost = f"its newest record, of {head.ref} at position {head.sequence} of the history, is missing"
            _LOG.warning("%s: %s; `metaloom verify %s` has details", run.location, lost, argument(run.path))
        return run

    def __reduce__(self) -> tuple[Any, ...]:
        # Open files belong to this process; another process opens the run again.
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
        """True if the newest session ended normally, so that removal of the last records would be detected.

        Sessions that were killed, are still writing, or ran an earlier version recorded only what existed when they
        started.
        """
        newest = newest_session(self.path, first_session(self.info))
        return newest is not None and newest.sealed

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration that the run was created with."""
        return self.info["config"]

    def config_of(self, ref: StageRef) -> Mapping[str, Any]:
        """Return the configuration for computing an output; for outputs that a fork shares, the parent's."""
        return origin(self.info, ref)["config"]

    def environment_of(self, ref: StageRef) -> Mapping[str, Any]:
        """Return the environment in which a stored output was computed: code, plug-ins, kernel, device.

        For sessions of earlier versions, which did not record it, this is the run's first environment. Raises
        StageMissing if the output is not stored.
        """
        token = self.record(ref).token
        if token not in self._sessions:
            self._sessions = {session.token: session for session in self.sessions()}
        if token in self._sessions:
            return self._sessions[token].environment
        return mapping(origin(self.info, ref).get("environment"))

    def sessions(self) -> list[ComputedWith]:
        """List the sessions that computed outputs and recorded their environment, in order."""
        return read_sessions(self.path, self.info)

    def __getitem__(self, iteration: int) -> Iteration:
        """Return an iteration, complete or not; negative numbers count from the last complete one.

        Raises StageMissing if the index is beyond the run's target.
        """
        (iteration,) = whole_numbers(iteration, "iteration")
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
        """Resolve a selection to complete iterations, each once, in ascending order; negative ones count from the end.

        Raises ValueError if an index is not an integer, and StageMissing if an iteration is not complete.
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
        return sorted({*found})

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

        All rows are loaded into memory; `scan_steps` yields them one inner step at a time.

        Args:
            iterations: Iterations to read; None for all complete ones.
            columns: Columns to read; None for all. `observation.NAME` and `action.NAME` are components (if the
                environment names them), `observation.*` selects all of them, and `reward_*` all reward terms.
            steps: Inner steps k to include; None for all.
            stage: A stored group: `rollouts_1`, or `memory_fill` for the initial replay buffer; None for the rollouts
                of all inner steps.
            task: Indices in the meta-batch, negative from the end; only these tasks are read.
            episode: Episode indices within each task.

        Raises:
            ValueError: a column, stage, task or episode does not exist.
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
        """Return a reader that yields the rows of `steps` one inner step at a time, with bounded memory."""
        chosen = self.select(iterations)
        return late.scan_steps(self, chosen, columns, steps, stage=stage, task=task, episode=episode)

    def episodes(
        self, iterations: Iterations = None, steps: Steps = None, *, task: Places = None, episode: Places = None
    ) -> "pa.Table":
        """Read one row per episode: return, length, termination, and its task's parameters as `task_*`.

        Facts become `fact_*` columns: a flag is True if it is set in any step; a number is its last value. Arguments
        select as in `steps`.
        """
        return late.read_episodes(self.files, self.select(iterations), steps, task, episode)

    def tasks(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per task with its parameters as `task_*`."""
        return late.read_tables(self.files, "tasks", self.select(iterations))

    def metrics(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per iteration with its metrics; null where a fork's parent, or the fork, lacks a metric."""
        return late.read_metrics(self.files, self.select(iterations))

    def evaluations(self, iterations: Iterations = None) -> "pa.Table":
        """Read one row per episode of the evaluations during training, with its task's parameters as `task_*`."""
        return late.read_tables(self.files, "evaluations", self.select(iterations))

    def table(
        self, stage: str, iterations: Iterations = None, columns: Sequence[str] | None = None, steps: Steps = None
    ) -> "pa.Table":
        """Read the arrays of any stage, with one row per entry along their common leading axes.

        Columns with axes task, episode and t yield a row per step; combined with a per-task column, they become lists
        in a row per task. Padding is omitted.

        Args:
            stage: Stage name, or the name of its group.
            iterations: Iterations to read; None for all complete ones. Iterations without this output have no rows.
            columns: Names of arrays; `NAME.*` selects all entries of a mapping. None for all.
            steps: Inner steps k to include; None for all.

        Raises:
            ValueError: a column or inner step does not exist.
            StageMissing: the stage does not exist or has no output.
        """
        chosen, wanted = self.select(iterations), chosen_steps(steps)
        first = Iteration(self, chosen[0] if chosen else 0).ref(stage, wanted[0] if wanted else 0)
        refs = [r for r in self.refs_of(chosen) if r.stage == first.stage and (wanted is None or r.step in wanted)]
        if not refs:
            self.record(first)  # raises StageMissing, listing what exists
        return late.read_entries(self.files, refs, columns)

    def transitions(self, rows: "Sequence[int] | Array") -> "pa.Table":
        """Read the transitions at these row numbers, such as a minibatch's, with their origins.

        Columns: row, iteration, stage and step (which collected it), task (index in its batch), task_id (in the fixed
        set, -1 without one; null for the fill), episode, t, observation, action, reward, next_observation, terminated.
        Only batches with requested rows are read. Raises StageMissing if a row is not stored, and ValueError if a row
        number is negative.
        """
        return late.read_transitions(self, np.asarray(rows, np.int64))

    def lineage(self) -> "pa.Table":
        """Read one row per stored output, in creation order, with its inputs, time, session and versions."""
        return late.lineage(self.record(ref) for ref in self.refs())


def open_run(path: str | Path) -> Run:
    """Open a run in a folder or at a URL for reading; see `Run.open`."""
    return Run.open(path)


def run_exists(path: str | Path) -> bool:
    """Return True if a folder or URL contains a run. Raises StorageFailed if it cannot be read."""
    folder = folder_of(path)
    follow(folder)
    with system_errors(folder, required="a folder that can be read", action="Check its permissions and its disk"):
        return (folder / "run.json").exists()


def find_runs(root: Path) -> list[Path]:
    """Return the folders of all runs in the runs folder, newest first.

    The list includes unreadable runs; opening one raises an error with the reason. Raises StorageFailed if an object
    store cannot be read.
    """
    url = url_of(root)
    if url is None:
        with system_errors(root, required="a folder that can be read", action="Check its permissions and its disk"):
            folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
        written = {folder: when for folder in folders if (when := _written(folder)) is not None}
        return sorted(written, key=lambda folder: written[folder], reverse=True)
    folders = (folder_of(f"{url}/{name}") for name in ObjectFolder(url).folders())
    created = {folder: when for folder in folders if (when := _created(folder)) is not None}
    return sorted(created, key=lambda folder: created[folder], reverse=True)


def _written(folder: Path) -> float | None:
    """Return the modification time of run.json or of an inaccessible folder; None if the folder is not a run."""
    try:
        return (folder / "run.json").stat().st_mtime
    except PermissionError:
        return folder.stat().st_mtime
    except OSError:
        return None


def _created(folder: Path) -> str | None:
    """Return the creation time of a run in object storage, or "" if it cannot be read; None if there is no run."""
    try:
        follow(folder)
        return str(read_sealed(folder / "run.json", indented=True).get("created", ""))
    except FileNotFoundError:
        return None
    except DamagedRun:
        return ""
