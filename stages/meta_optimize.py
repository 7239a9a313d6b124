"""The update of the meta-parameters that ends an iteration."""

from collections.abc import Sequence

import numpy as np

from pipeline.algorithms import Algorithm
from pipeline.algorithms.contract import ParallelMap
from pipeline.diagnostics import step_metrics
from pipeline.policies.gaussian import GaussianPolicy
from pipeline.types import LearnerState, Metrics, Params, Step, Update

ENV_STEPS = "env_steps"
"""Environment steps made so far."""

ENV_STEPS_NOMINAL = "env_steps_nominal"
"""Environment steps there would have been if no episode had ended before its step limit."""


def meta_optimize(
    policy: GaussianPolicy,
    algorithm: Algorithm,
    learner: LearnerState,
    steps: Sequence[Step],
    *,
    run_seed: int,
    iteration: int,
    parallel: ParallelMap = map,
) -> Update:
    """The learner of the next iteration, and the metrics of this one.

    Args:
        policy: the policy.
        algorithm: the meta-update.
        learner: input of this iteration.
        steps: samples of the rounds 0 ... inner_steps.
        run_seed: with the iteration, decides the minibatches.
        iteration: the number of this iteration.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """
    updated, update_metrics = algorithm.optimize(
        policy, learner, steps, run_seed=run_seed, iteration=iteration, parallel=parallel
    )
    counters = _count_steps(learner, steps)
    metrics: Metrics = {}
    for step in steps:
        metrics |= step_metrics(step)
    metrics |= update_metrics | {name: float(count) for name, count in counters.items()}
    return Update(LearnerState(updated.params, updated.optimizer, updated.extra | counters), metrics)


def _count_steps(learner: LearnerState, steps: Sequence[Step]) -> Params:
    made = sum(step.episodes.num_steps for step in steps)
    nominal = sum(int(step.episodes.real.sum()) * step.episodes.rewards.shape[2] for step in steps)
    return {
        ENV_STEPS: np.array(int(learner.extra[ENV_STEPS]) + made, np.int64),
        ENV_STEPS_NOMINAL: np.array(int(learner.extra[ENV_STEPS_NOMINAL]) + nominal, np.int64),
    }
