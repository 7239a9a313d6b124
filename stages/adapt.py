"""One inner step of every task on its own samples."""

from collections.abc import Sequence

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.types import LearnerState, ParallelMap, Step, TaskParams


def adapt(
    learner: Learner[Step, Sequence[Step]],
    state: LearnerState,
    params: TaskParams,
    step: Step,
    *,
    parallel: ParallelMap = map,
) -> TaskParams:
    """Parameters of every task after inner step `step.k`.

    Args:
        learner: what the inner step minimizes, and how far it goes.
        state: input of the iteration; holds the step sizes when they are learned.
        params: parameters that collected the step's episodes.
        step: samples of round k.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """
    return learner.adapt(state, params, step, parallel=parallel)
