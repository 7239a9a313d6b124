"""One inner step of every task on its own samples."""

from metaloom.pipeline.algorithms.contract import Algorithm
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.types import LearnerState, ParallelMap, Step, TaskParams


def adapt(
    policy: GaussianPolicy,
    algorithm: Algorithm,
    learner: LearnerState,
    params: TaskParams,
    step: Step,
    *,
    parallel: ParallelMap = map,
) -> TaskParams:
    """Parameters of every task after inner step `step.k`.

    Args:
        policy: the policy.
        algorithm: what the inner step minimizes, and how far it goes.
        learner: input of the iteration; holds the step sizes when they are learned.
        params: parameters that collected the step's episodes.
        step: samples of round k.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """
    return algorithm.adapt(policy, learner, params, step, parallel=parallel)
