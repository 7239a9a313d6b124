"""Observers of a training run, and the reports that they receive."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from metaloom.flows.rollouts.backend import Traffic
from metaloom.pipeline.envs import REPRODUCED
from metaloom.pipeline.estimation.statistics import ClassReturns
from metaloom.pipeline.types import Array, Evaluation
from metaloom.stages.faults import StageFault
from metaloom.storage import StageRef


@dataclass(frozen=True)
class IterationReport:
    """Report about a completed iteration, for progress displays."""

    iteration: int  # index of the completed iteration, from 0
    iterations: int  # target number of iterations in the run
    metrics: Mapping[str, float]  # metrics of the iteration, as stored
    stage_seconds: Mapping[str, float]  # keyed by stage, e.g. collect_rollouts.1; excludes stages already stored
    elapsed_seconds: float  # time since this process began training, in seconds
    steps_per_second: float | None  # sampling speed since the previous iteration; None if the rollouts were stored
    evaluation_returns: Sequence[float] = ()  # mean test returns by number of adaptation steps, if evaluated
    # Returns by task class and per-task mean returns [B], one item per inner step; empty without classes or episodes.
    class_returns: Sequence[ClassReturns] = ()
    task_returns: Sequence[Array] = ()
    steps: int = 0  # number of environment steps that this process sampled for the iteration
    traffic: Traffic | None = None  # traffic with worker processes since this process began; None without workers


@dataclass(frozen=True)
class Observer:
    """Callbacks during the training of a run. The defaults do nothing and never stop the training."""

    stage_started: Callable[[StageRef], None] = lambda ref: None  # called before each stage
    iteration_done: Callable[[IterationReport], None] = lambda report: None  # called after each iteration
    should_stop: Callable[[], bool] = lambda: False  # called before each stage; training stops if it returns True
    reads: bool = False  # True if `iteration_done` reads the run; training then waits until the iteration is stored

    def after(
        self, stage_started: Callable[[StageRef], object], iteration_done: Callable[[IterationReport], object]
    ) -> "Observer":
        """Return an observer that calls these functions before its own."""

        def both_started(ref: StageRef) -> None:
            stage_started(ref)
            self.stage_started(ref)

        def both_done(report: IterationReport) -> None:
            iteration_done(report)
            self.iteration_done(report)

        return replace(self, stage_started=both_started, iteration_done=both_done)


def strict(observer: Observer) -> Observer:
    """Return an observer that also raises StageFault after an iteration whose witness differs or is missing."""

    def iteration_done(report: IterationReport) -> None:
        observer.iteration_done(report)
        if REPRODUCED not in report.metrics:
            raise StageFault(
                f"iteration {report.iteration}: --strict found no episode to replay, since the stages of the run "
                "output no tasks or no rollouts; remove --strict"
            )
        if not report.metrics[REPRODUCED]:
            raise StageFault(
                f"iteration {report.iteration}: an episode differed when it was replayed on a new copy "
                "of the environment (see the warning above); --strict requires identical results"
            )

    return replace(observer, iteration_done=iteration_done)


def mean_test_returns(outputs: Iterable[object]) -> list[float]:
    """Return the mean test returns by number of adaptation steps; empty if no output is an evaluation."""
    found = (output for output in outputs if isinstance(output, Evaluation))
    return [mean for evaluation in found for mean in evaluation.test_returns.mean(axis=(0, 2)).tolist()]
