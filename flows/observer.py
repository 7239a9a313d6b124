"""Events of a training run for observers."""

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
    """Report of a completed iteration, for progress displays.

    Attributes:
        iteration: Index of the completed iteration, from 0.
        iterations: Total number of iterations of the run.
        metrics: Metrics of the iteration, as stored.
        stage_seconds: Seconds by stage, for example collect_rollouts.1; stages that were already stored are missing.
        elapsed_seconds: Seconds since this process began training.
        steps_per_second: Environment steps of the iteration per second since the previous one; None if its rollouts
            were already stored.
        evaluation_returns: Mean test return by number of adaptation steps, if this iteration was evaluated.
        class_returns: Returns by class of task, per inner step; empty without classes or if the episodes were not
            available.
        task_returns: Mean return of every task, [B] per inner step; empty if the episodes were not available.
        steps: Environment steps sampled for the iteration by this process.
        traffic: Traffic with worker processes since the process began; None without workers.
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
    """Callbacks during the training of a run; by default they do nothing and never stop it.

    Attributes:
        stage_started, iteration_done: Called before a stage and after an iteration.
        should_stop: Called before every stage; True stops the training.
        reads: True if `iteration_done` reads the run; training then waits until the iteration is stored.
    """

    stage_started: Callable[[StageRef], None] = lambda ref: None
    iteration_done: Callable[[IterationReport], None] = lambda report: None
    should_stop: Callable[[], bool] = lambda: False
    reads: bool = False


def strict(observer: Observer) -> Observer:
    """Return an observer that also ends training if an iteration's witness differs or is missing.

    The iteration is stored before, and `resume` continues after it.
    """

    def iteration_done(report: IterationReport) -> None:
        observer.iteration_done(report)
        if REPRODUCED not in report.metrics:
            raise StageFault(
                f"iteration {report.iteration}: --strict found no episode to play again, since the stages of the run "
                "output no tasks or no rollouts; remove --strict"
            )
        if not report.metrics[REPRODUCED]:
            raise StageFault(
                f"iteration {report.iteration}: an episode differed when it was replayed on a new copy "
                "of the environment (see the warning above); --strict requires the same bits"
            )

    return replace(observer, iteration_done=iteration_done)


def mean_test_returns(outputs: Iterable[object]) -> list[float]:
    """Return the mean test returns by number of adaptation steps from an iteration's evaluation, if any."""
    found = (output for output in outputs if isinstance(output, Evaluation))
    return [mean for evaluation in found for mean in evaluation.test_returns.mean(axis=(0, 2)).tolist()]
