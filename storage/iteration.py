"""One iteration of a run, batch by batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from metaloom.pipeline.shown import Row, Shown, size
from metaloom.pipeline.types import (
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
from metaloom.storage.errors import StageMissing, damaged
from metaloom.storage.format.codec import Value
from metaloom.storage.format.refs import StageRef
from metaloom.storage.read.outputs import StoredOutputs
from metaloom.storage.read.selection import Places, places, shape_of_rounds

if TYPE_CHECKING:
    import pyarrow as pa
    import xarray as xr

V = TypeVar("V", bound=Value)


@dataclass(frozen=True, repr=False)
class Iteration(Shown):
    """The stored batches of one iteration. Every method raises StageMissing for what is not stored."""

    run: StoredOutputs
    index: int

    def shown(self) -> tuple[str, list[Row]]:
        """Stages that are stored: what each gave, its size on disk, how long it took."""
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
        """The tasks, or some of them by place."""
        return self._load("tasks", 0, TaskBatch, task)

    def memory_fill(self, *, task: Places = None) -> EpisodeBatch:
        """The episodes that the replay buffer begins with; they are those of iteration 0, before its tasks."""
        return self._load("memory_fill", 0, EpisodeBatch, task)

    def rollouts(self, k: int = 0, *, task: Places = None) -> EpisodeBatch:
        """The episodes of inner step k: 0 before adaptation, K after it.

        Args:
            k: the inner step.
            task: places of tasks; only their parts of the arrays are read. None for all.
        """
        return self._load("rollouts", k, EpisodeBatch, task)

    def samples(self, k: int = 0, *, task: Places = None) -> Samples:
        """Read what processing added to the episodes of inner step k; tasks as `rollouts` takes them."""
        return self._load("samples", k, Samples, task)

    def adapted(self, k: int = 0, *, task: Places = None) -> TaskParams:
        """Every task's parameters after k + 1 inner steps; tasks as `rollouts` takes them."""
        return self._load("adapted", k, TaskParams, task)

    def minibatches(self) -> Minibatches:
        """Read the numbers of the transitions that the gradient steps learned from."""
        return self._load("minibatches", 0, Minibatches)

    def transitions(self, update: int = 0, *, context: bool = False, rows: slice = slice(None)) -> "pa.Table":
        """Read what a gradient step learned from: one row per transition, as `Run.transitions` gives them.

        Before those columns stand `place` (k of K), `memory` (the task whose replay buffer the row is from) and `n`.

        Args:
            update: the gradient step, from 0.
            context: the transitions that tasks were inferred from instead.
            rows: which of the K x N transitions; only what holds those is read.
        """
        from metaloom.storage.read.transitions import minibatch_table

        return minibatch_table(self.run, self.minibatches(), update, context=context, chosen=rows)

    def learner(self) -> LearnerState:
        """Read the learner that the iteration started from."""
        return self._expect(self.run.files.stages.learner_ref(self.index), Update).learner

    def update(self) -> Update:
        """Read what the iteration led to: the next learner, and the metrics."""
        return self._expect(self.run.files.stages.last_ref(self.index), Update)

    def evaluation(self) -> Evaluation:
        """Read the evaluation of the learner that the iteration led to."""
        return self._load("evaluation", 0, Evaluation)

    def metrics(self) -> Metrics:
        """The numbers that describe the iteration."""
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
