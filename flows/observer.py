"""What whoever watches a run is told, be it by the process that trains it or by what that has stored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from metaloom.flows.rollouts.traffic import Traffic
from metaloom.pipeline.envs.config import REPRODUCED
from metaloom.pipeline.estimation.statistics import ClassReturns
from metaloom.pipeline.types import Array, Evaluation
from metaloom.stages.faults import StageFault
from metaloom.storage import StageRef


@dataclass(frozen=True)
class IterationReport:
    """Report of a completed iteration, for progress displays.

    Attributes:
        iteration: the iteration that was completed, counted from 0.
        iterations: how many the run will have.
        metrics: the iteration's metrics, as stored.
        stage_seconds: wall seconds by stage, for example collect_rollouts.1; empty stages were already stored.
        elapsed_seconds: wall seconds since this process began to train.
        steps_per_second: environment steps sampled for the iteration over the wall seconds since the one before; None
            when its rollouts were stored already.
        evaluation_returns: mean test return after every number of adaptation steps, if an evaluation was made now.
        class_returns: of every inner step, where the environment has classes of tasks; empty where the iteration's
            episodes were not at hand.
        task_returns: [B] mean return of every task, of every inner step; empty where the episodes were not at hand.
        steps: environment steps sampled for the iteration by this process.
        traffic: with worker processes, since the process began; None without.
    """

    iteration: int
    iterations: int
    metrics: Mapping[str, float]
    stage_seconds: Mapping[str, float]
    elapsed_seconds: float
    steps_per_second: float | None
    evaluation_returns: Sequence[float] = ()
    class_returns: Sequence[ClassReturns] = ()
    task_returns: Sequence[Array] = ()
    steps: int = 0
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Observer:
    """Callbacks of whoever watches a run train; by default they do nothing and never stop it.

    Attributes:
        stage_started, iteration_done: Called before a stage and after an iteration.
        should_stop: Asked before every stage.
        reads: True if `iteration_done` reads the run: training then waits until all of the iteration is stored.
    """

    stage_started: Callable[[StageRef], None] = lambda ref: None
    iteration_done: Callable[[IterationReport], None] = lambda report: None
    should_stop: Callable[[], bool] = lambda: False
    reads: bool = False


def strict(observer: Observer) -> Observer:
    """The same observer, which ends training after an iteration whose witness differs or is missing.

    The iteration is stored by then, and `resume` continues after it.
    """

    def iteration_done(report: IterationReport) -> None:
        observer.iteration_done(report)
        if REPRODUCED not in report.metrics:
            raise StageFault(
                f"iteration {report.iteration}: --strict found no episode that was played again, since the stages of "
                "the run give no tasks or no rollouts; leave --strict out"
            )
        if not report.metrics[REPRODUCED]:
            raise StageFault(
                f"iteration {report.iteration}: an episode came out differently when it was played again on a new copy "
                "of the environment (see the warning above); --strict requires the same bits"
            )

    return replace(observer, iteration_done=iteration_done)


def mean_test_returns(outputs: Iterable[object]) -> list[float]:
    """Mean test return by number of adaptation steps, of those outputs that are evaluations."""
    found = (output for output in outputs if isinstance(output, Evaluation))
    return [mean for evaluation in found for mean in evaluation.test_returns.mean(axis=(0, 2)).tolist()]
