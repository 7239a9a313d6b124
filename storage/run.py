"""Open a run and read what it holds. Nothing is seen before its commit record, and nothing unchecked is decoded."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.storage.errors import (
    DamagedRun,
    IncompatibleFormat,
    NotARun,
    RunNotFound,
    StageMissing,
    damaged,
    system_errors,
)
from metaloom.storage.format.canonical import read_sealed
from metaloom.storage.format.codec import KINDS, Value
from metaloom.storage.format.records import FORMATS, StageRecord, read_record
from metaloom.storage.format.refs import StageRef
from metaloom.storage.format.segments import Link
from metaloom.storage.format.sessions import newest_session
from metaloom.storage.format.stages import EARLIER, ON_POLICY, StageTable
from metaloom.storage.iteration import Iteration
from metaloom.storage.keep.thinning import thinnable
from metaloom.storage.read.ancestry import (
    boundaries,
    contributors,
    first_iteration,
    first_sequence,
    first_session,
    origin,
)
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.history import chain_problems
from metaloom.storage.read.selection import Places, Steps, places, whole_numbers
from metaloom.storage.read.sessions import ComputedWith, mapping, read_sessions
from metaloom.storage.remote.log import RemoteLog, follow
from metaloom.storage.remote.places import argument, folder_of, location, url_of

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger(__name__)

_MEMBERS = {
    "id": str,
    "config": dict,
    "config_digest": str,
    "environment": dict,
    "system": dict,
    "versions": dict,
    "created": str,
}
"""What every run.json has, with its type."""

Iterations = None | int | range | slice | Sequence[int]
"""All complete iterations, one of them (negative: from the end), or some."""


class Run:
    """A stored run. It follows the run while a writer goes on, and never changes it."""

    def __init__(self, path: Path, info: Mapping[str, Any], remote: RemoteLog | None = None) -> None:
        self.path = path
        self.info = info
        self.files = CommittedFiles(path, StageTable.of(info), remote)
        self._sessions: dict[str, ComputedWith] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the run in a folder or under a URL, for reading. A writer may go on meanwhile.

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
        if lost := _lost_newest(run):
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
        """The run's name: that of its folder."""
        return self.path.resolve().name

    @property
    def location(self) -> str:
        """Place of the run: a URL for a run under object storage, of which `path` is a cache; else the path."""
        return location(self.path)

    @property
    def capacity(self) -> int:
        """Iterations that the run has room for: as many as it shall have.

        Raises:
            DamagedRun: the file that says so is missing or changed.
        """
        return self.files.capacity()

    @property
    def is_sealed(self) -> bool:
        """True if the session that wrote last ended by itself: then records that were taken away behind it are missed.

        One that was killed, still writes, or is of an earlier version has only told what was there when it began.
        """
        newest = newest_session(self.path, first_session(self.info))
        return newest is not None and newest.sealed

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the run was created with."""
        return self.info["config"]

    def config_of(self, ref: StageRef) -> Mapping[str, Any]:
        """The configuration that decides an output, stored or not: a fork's first ones are its parent's."""
        return origin(self.info, ref)["config"]

    def environment_of(self, ref: StageRef) -> Mapping[str, Any]:
        """Return what a stored output was computed with besides its settings: code, plug-ins, kernel, device.

        As its session wrote it down; those of earlier versions did not, and then it is what their run began with.

        Raises:
            StageMissing: the output is not stored.
        """
        token = self.record(ref).token
        if token not in self._sessions:
            self._sessions = {session.token: session for session in self.sessions()}
        if token in self._sessions:
            return self._sessions[token].environment
        return mapping(origin(self.info, ref).get("environment"))

    def components(self, axis: str) -> Mapping[str, str]:
        """Name the entries of an `observation` or `action`, each with its unit; nothing where none were declared."""
        declared = mapping(mapping(self.info["environment"].get("components")).get(axis))
        names, units = (_texts(declared.get(member)) for member in ("names", "units"))
        return dict(zip(names, units, strict=False))

    @property
    def facts(self) -> Mapping[str, str]:
        """Name what the environment tells besides observations and rewards, each with its unit; often nothing."""
        declared = mapping(self.info["environment"].get("facts"))
        return {name: str(mapping(fact).get("unit", "1")) for name, fact in declared.items()}

    def sessions(self) -> list[ComputedWith]:
        """List the sessions that computed outputs, the first one first, as far as they wrote down with what."""
        return read_sessions(self.path, self.info)

    @property
    def stages(self) -> StageTable:
        """The stages that the run consists of."""
        return self.files.stages

    def learner_ref(self, iteration: int) -> StageRef:
        """The stage whose output is the learner that an iteration starts from, stored or not."""
        return self.stages.learner_ref(iteration)

    def last_ref(self, iteration: int) -> StageRef:
        """The stage whose output ends an iteration, stored or not."""
        return self.stages.last_ref(iteration)

    @property
    def iterations(self) -> range:
        """The complete iterations: those from the first on whose last stage is stored."""
        return range(self.files.num_iterations())

    def refs(self) -> list[StageRef]:
        """Every stored output, in the order in which runs compute them."""
        return self.stages.sort(self.files.refs())

    def refs_of(self, iterations: Collection[int]) -> list[StageRef]:
        """Every stored output of some iterations, in the order in which runs compute them."""
        return self.stages.sort(self.files.refs_of(iterations))

    def contains(self, ref: StageRef) -> bool:
        """Tell whether an output is stored."""
        return self.files.contains(ref)

    def is_thinned(self, ref: StageRef) -> bool:
        """Tell whether an output's arrays were removed by thinning; its record, tables and metrics are still there.

        Raises:
            StageMissing: the output is not stored.
        """
        if not self.contains(ref):
            raise self._missing(ref)
        marked = self.files.thinned(ref.iteration).get(ref)
        return marked is not None and marked == self.record(ref).sha256

    def thinnable(self, iterations: Collection[int]) -> list[StageRef]:
        """The stored outputs of some iterations whose arrays may go, or are gone."""
        return thinnable(self.files.refs_of(iterations), {*iterations}, self.stages)

    def thinned_iterations(self) -> list[int]:
        """The iterations of which arrays were removed by thinning."""
        return self.files.thinned_iterations()

    def record(self, ref: StageRef) -> StageRecord:
        """Read the record of an output: what it was made from, and how to check it.

        Raises:
            StageMissing: it is not stored.
            DamagedRun: its record is damaged.
        """
        try:
            return self.files.record(ref)
        except FileNotFoundError:
            raise self._missing(ref) from None

    def load(self, ref: StageRef, *, task: Places = None) -> Value:
        """A stage's output, every chunk checked against its record.

        Args:
            ref: the output.
            task: places of the tasks to read, of an output that has a task axis; None for all.

        Raises:
            ValueError: there is no such task, or there are no tasks in it.
            StageMissing: it is not stored.
            StageThinned: its arrays were removed.
            DamagedRun: a file of it is missing or changed.
        """
        record = self.record(ref)
        return self.files.read_value(record, None if task is None else self._places(record, task))

    def _places(self, record: StageRecord, task: Places) -> list[int]:
        """Places of tasks in an output."""
        specs = (self.files.spec(chunk.array) for chunk in record.chunks)
        counts = {spec.shape[0] for spec in specs if spec.dims[1:2] == ("task",)}
        if len(counts) != 1:
            raise ValueError(f"found task={task!r} for {record.ref}, whose arrays are not of tasks; leave `task` out")
        return places(task, counts.pop(), "task")

    def lengths(self, ref: StageRef) -> Array:
        """Read the steps of each episode of a stored batch, [B, E] int32; nothing else of it is read.

        Raises:
            StageMissing: it is not stored.
            StageThinned: its arrays were removed.
            DamagedRun: it is not what was committed, or no batch of episodes.
        """
        return self.files.read_lengths(self.record(ref))

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """A stored batch of episodes without behavior and reward terms, which are not read; raises as `lengths`."""
        return self.files.read_experience(self.record(ref))

    def __getitem__(self, iteration: int) -> Iteration:
        """One iteration, complete or not; a negative number counts from the last complete one.

        Raises:
            StageMissing: the run is not to have so many iterations.
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
        """The complete iterations that a selection names; negative numbers count from the end.

        Raises:
            ValueError: they are no whole numbers.
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
        """One row per real environment step; padding is left out.

        Args:
            iterations: None for all complete ones.
            columns: None for all; only what the columns need is read. `observation.NAME` and `action.NAME` are single
                components, where the environment names them, and `observation.*` all of them; `reward_*` are all terms.
            steps: inner steps k to include; None for all.
            stage: one group of arrays: `rollouts_1`, or `memory_fill`, what a replay buffer began with; None for the
                rollouts of all inner steps.
            task: places in the meta-batch; only their parts of the arrays are read. Negative ones count from the end.
            episode: places among the episodes of each task.

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
        """One row per episode: return, length, how it ended, and the parameters of its task as `task_*`.

        What the environment tells besides as `fact_*`: of a flag of steps if it was true in any of them, of a number
        of steps the last one. Selected as `steps` does.
        """
        from metaloom.storage.read.frames import StepFilter, read_episodes

        return read_episodes(self.files, StepFilter(self.select(iterations), steps, None, task, episode))

    def tasks(self, iterations: Iterations = None) -> "pa.Table":
        """One row per task with its parameters as `task_*`."""
        return self._table("tasks", iterations)

    def metrics(self, iterations: Iterations = None) -> "pa.Table":
        """One row per iteration with its metrics."""
        from metaloom.storage.read.frames import read_metrics

        return read_metrics(self.files, self.select(iterations))

    def evaluations(self, iterations: Iterations = None) -> "pa.Table":
        """One row per episode of the evaluations during training, with the parameters of its task as `task_*`."""
        return self._table("evaluations", iterations)

    def transitions(self, rows: "Sequence[int] | Array") -> "pa.Table":
        """One row per row number, as minibatches name transitions: where it is from, and what it is.

        Columns: row, iteration, stage and step (which collected it), task (place in its batch), task_id (in the fixed
        set, -1 without one; null for the fill), episode, t, observation, action, reward,
        next_observation, terminated. Only batches that hold one of the rows are read.

        Raises:
            StageMissing: a row is not stored.
            ValueError: a number is negative.
        """
        from metaloom.storage.read.transitions import read_transitions

        return read_transitions(self, np.asarray(rows, np.int64))

    def lineage(self) -> "pa.Table":
        """One row per stored output, in the order of their making: from what, when, by which session and versions."""
        from metaloom.storage.read.frames import lineage

        return lineage(self._records())

    def _records(self) -> Iterable[StageRecord]:
        return (self.record(ref) for ref in self.refs())

    def _table(self, name: str, iterations: Iterations) -> "pa.Table":
        from metaloom.storage.read.frames import read_tables

        return read_tables(self.files, name, self.select(iterations))

    def _missing(self, ref: StageRef) -> StageMissing:
        steps = sorted(r.step for r in self.files.refs_of({ref.iteration}) if r.stage == ref.stage)
        if steps and ref.iteration in self.iterations:
            return StageMissing(
                self.location,
                found=f"{ref} is not stored, and iteration {ref.iteration} is complete",
                required=f"an inner step that it has: {', '.join(map(str, steps))}",
                action=f"`metaloom show {argument(self.path)}@{ref.iteration}` lists them",
            )
        return self._incomplete(ref.iteration, f"{ref} is not stored")

    def _incomplete(self, iteration: int, found: str | None = None) -> StageMissing:
        count = len(self.iterations)
        # A run that has all that it shall have goes on only if it is told how far.
        further = f" --iterations {iteration + 1}" if iteration >= self.capacity else ""
        return StageMissing(
            self.location,
            found=f"{found or f'iteration {iteration} is not there'}; {count} iterations are complete",
            required=f"an iteration from 0 to {count - 1}" if count else "a run with a complete iteration",
            action=f"`metaloom resume {argument(self.path)}{further}` computes what is missing",
        )


def open_run(path: str | Path) -> Run:
    """Open the run in a folder or under a URL, for reading; see Run.open."""
    return Run.open(path)


def run_exists(path: str | Path) -> bool:
    """Tell whether there is a run in a folder or under a URL.

    Raises:
        StorageFailed: the folder, or the object store of a URL, cannot be read.
    """
    folder = folder_of(path)
    follow(folder)
    with system_errors(folder, required="a folder that can be read", action="Check its permissions and its disk"):
        return (folder / "run.json").exists()


def read_info(path: Path) -> dict[str, Any]:
    """Read a run's run.json."""
    with system_errors(path, required="a folder that can be read", action="Check its permissions and its disk"):
        found = path.is_dir()
    if not found:
        raise RunNotFound(
            location(path),
            found="no such folder",
            required="the folder of a run",
            action="`metaloom ls` lists the runs",
        )
    try:
        info = read_sealed(path / "run.json", indented=True)
    except FileNotFoundError:
        raise NotARun(
            location(path), found="a folder without run.json", required="a run", action="`metaloom ls` lists the runs"
        ) from None
    _require_known(info, path / "run.json")
    return info


def require_own_records(run: Run) -> None:
    """Refuse a run.json that was exchanged or changed, seal and all: the first records behind it name its hash."""
    try:
        follows = boundaries(run.info)
        found = [_link_at(run, first_sequence(info), first_iteration(info)) for info in contributors(run.info)]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(run.path / "run.json", "does not say which stages and ancestors the run has") from None
    for problem in chain_problems(run.files, (link for link in found if link is not None), follows):
        raise problem


def _link_at(run: Run, sequence: int, iteration: int) -> Link | None:
    """The record at a position, if it is the first of its iteration and can be read; else `verify` looks at it."""
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


def _require_known(info: Mapping[str, Any], where: Path) -> None:
    if info.get("format") not in FORMATS:
        raise _incompatible(where, f"format {info.get('format')!r}", " or ".join(FORMATS))
    wrong = [name for name, kind in _MEMBERS.items() if not isinstance(info.get(name), kind)]
    if wrong:
        raise _incompatible(where, f"no {' and no '.join(wrong)}", f"the members {', '.join(_MEMBERS)}")
    if "stages" not in info and (last := info.get("last_stage", ON_POLICY.last)) not in EARLIER:
        raise _incompatible(where, f"last_stage {last!r}", " or ".join(EARLIER))
    try:
        unknown = {stage.output for stage in StageTable.of(info).stages} - {*KINDS}
    except (KeyError, TypeError, ValueError) as error:
        raise _incompatible(where, f"stages that are no table ({error})", "a table of stages") from None
    if unknown:
        raise _incompatible(
            where, f"stages that give {', '.join(sorted(map(str, unknown)))}", f"outputs of {', '.join(KINDS)}"
        )


def _lost_newest(run: Run) -> str:
    """Words about the newest record, if it is known that there was one and it is gone; else none."""
    known = newest_session(run.path, first_session(run.info))
    if known is None or known.head is None or known.head.sequence in known.lost or run.contains(known.head.ref):
        return ""
    return f"its newest record, of {known.head.ref} at position {known.head.sequence} of the history, is missing"


def _texts(value: object) -> list[str]:
    """The entries of a list as text; a run from elsewhere may have anything in its place."""
    return [str(entry) for entry in cast(list[object], value)] if isinstance(value, list) else []


def _incompatible(where: Path, found: str, required: str) -> IncompatibleFormat:
    action = "Use the version of metaloom that wrote the run; run.json names it under `versions`"
    return IncompatibleFormat(where, found=found, required=required, action=action)
