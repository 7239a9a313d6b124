"""The update of the meta-parameters that ends an iteration."""

from collections.abc import Sequence
from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.estimation.diagnostics import NO_MEASURES, Measures, step_metrics, with_own
from metaloom.pipeline.types import LearnerState, Metrics, ParallelMap, Step, Update
from metaloom.stages.counters import finished, updated


def meta_optimize(
    learner: Learner[Any, Any],
    state: LearnerState,
    steps: Sequence[Step],
    *,
    run_seed: int,
    iteration: int,
    parallel: ParallelMap = map,
    measures: Measures = NO_MEASURES,
    experience: object = None,
) -> Update:
    """Compute the learner state of the next iteration and the metrics of this one.

    Args:
        learner: The algorithm.
        state: Input of this iteration.
        steps: Episodes and samples before inner step 0, 1, ... and after the last.
        run_seed: Decides the minibatches, with the iteration.
        iteration: Iteration number.
        parallel: Maps over chunks of tasks; the result does not depend on it.
        measures: Additional measurements of every step.
        experience: Training data of the algorithm, if it is more than these steps.
    """
    learned_from = steps if experience is None else experience
    after, update_metrics = updated(
        learner, state, learned_from, run_seed=run_seed, iteration=iteration, parallel=parallel
    )
    metrics: Metrics = {}
    for step in steps:
        metrics |= with_own(step_metrics(step), measures.of_step(step))
    return finished(state, after, [step.episodes for step in steps], metrics, update_metrics)
