"""The update of the meta-parameters that ends an iteration."""

from collections.abc import Sequence
from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.estimation.diagnostics import step_metrics
from metaloom.pipeline.types import LearnerState, Metrics, ParallelMap, Step, Update
from metaloom.stages.counters import counted


def meta_optimize(
    policy: Any,
    algorithm: Any,
    learner: LearnerState,
    steps: Sequence[Step],
    *,
    run_seed: int,
    iteration: int,
    parallel: ParallelMap = map,
) -> Update:
    """The learner of the next iteration, and the metrics of this one.

    Args:
        policy: of an algorithm that is no Learner yet.
        algorithm: the meta-update.
        learner: input of this iteration.
        steps: samples of the rounds 0 ... inner_steps.
        run_seed: with the iteration, decides the minibatches.
        iteration: the number of this iteration.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """
    position = {"run_seed": run_seed, "iteration": iteration, "parallel": parallel}
    if isinstance(algorithm, Learner):
        updated, update_metrics = algorithm.update(learner, steps, **position)
    else:
        updated, update_metrics = algorithm.optimize(policy, learner, steps, **position)
    counters = counted(learner, [step.episodes for step in steps])
    metrics: Metrics = {}
    for step in steps:
        metrics |= step_metrics(step)
    metrics |= update_metrics | {name: float(count) for name, count in counters.items()}
    return Update(LearnerState(updated.params, updated.optimizer, updated.extra | counters), metrics)
