"""The update of the meta-parameters that ends an iteration."""

from collections.abc import Sequence

from metaloom.pipeline.algorithms.contract import Algorithm
from metaloom.pipeline.estimation.diagnostics import step_metrics
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.types import LearnerState, Metrics, ParallelMap, Step, Update
from metaloom.stages.counters import counted


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
    counters = counted(learner, [step.episodes for step in steps])
    metrics: Metrics = {}
    for step in steps:
        metrics |= step_metrics(step)
    metrics |= update_metrics | {name: float(count) for name, count in counters.items()}
    return Update(LearnerState(updated.params, updated.optimizer, updated.extra | counters), metrics)
