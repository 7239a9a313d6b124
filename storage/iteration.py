"""One iteration of a run, batch by batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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

if TYPE_CHECKING:
    import pyarrow as pa
    import xarray as xr

    from metaloom.storage.run import Run

V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Iteration:
    """The stored batches of one iteration. Every method raises StageMissing for what is not stored."""

    run: "Run"
    index: int

    def tasks(self) -> TaskBatch:
        """The tasks."""
        return self._load("tasks", 0, TaskBatch)

    def memory_fill(self) -> EpisodeBatch:
        """The episodes that the replay buffer begins with; they are those of iteration 0, before its tasks."""
        return self._load("memory_fill", 0, EpisodeBatch)

    def rollouts(self, k: int = 0) -> EpisodeBatch:
        """The episodes of inner step k: 0 before adaptation, K after it."""
        return self._load("rollouts", k, EpisodeBatch)

    def samples(self, k: int = 0) -> Samples:
        """Read what processing added to the episodes of inner step k."""
        return self._load("samples", k, Samples)

    def adapted(self, k: int = 0) -> TaskParams:
        """Every task's parameters after k + 1 inner steps."""
        return self._load("adapted", k, TaskParams)

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
        return self.update().metrics

    def xarray(self, k: int = 0) -> "xr.Dataset":
        """Tasks, episodes and samples of inner step k with named axes and units."""
        from metaloom.storage.read.datasets import to_xarray

        self.run.record(self._ref("rollouts", k))
        return to_xarray(self.run.files, self.index, k)

    def _load(self, group: str, step: int, kind: type[V]) -> V:
        return self._expect(self._ref(group, step), kind)

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

    def _expect(self, ref: StageRef, kind: type[V]) -> V:
        value = self.run.load(ref)
        if not isinstance(value, kind):
            raise damaged(self.run.files.record_path(ref), f"holds a {type(value).__name__}")
        return value
