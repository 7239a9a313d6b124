"""The gradient steps that end an iteration of an off-policy algorithm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.estimation.diagnostics import NO_MEASURES, Measures, episode_metrics, with_own
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, Minibatch, ParallelMap, Update
from metaloom.stages.counters import finished, updated


def update(
    learner: Learner[Any, Iterable[Minibatch]],
    state: LearnerState,
    minibatches: Iterable[Minibatch],
    rounds: Mapping[int, Sequence[EpisodeBatch]],
    *,
    fill: Sequence[EpisodeBatch] = (),
    run_seed: int,
    iteration: int,
    parallel: ParallelMap = map,
    measures: Measures = NO_MEASURES,
) -> Update:
    """Compute the learner state of the next iteration and the metrics of this one.

    Args:
        learner: The algorithm.
        state: Input of this iteration.
        minibatches: Minibatch of each gradient step, in order.
        rounds: Episodes that this iteration collected, by the number of task inferences of their actors: 0 if they
            acted by the prior, 1 if they acted by what they had seen of their task.
        fill: Episodes that filled the replay buffer before; they count as environment steps.
        run_seed: Decides the noise of the gradient steps, with the iteration.
        iteration: Iteration number.
        parallel: Maps over parts of a minibatch; the result does not depend on it.
        measures: Additional measurements of every rollout batch.
    """
    # Non-finite parameters are detected at the end, with a better message than a warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        after, update_metrics = updated(
            learner, state, minibatches, run_seed=run_seed, iteration=iteration, parallel=parallel
        )
    metrics: Metrics = {}
    for k, episodes in rounds.items():
        metrics |= with_own(episode_metrics(episodes, k), measures.of_round(episodes, k))
    collected = [*fill, *(episodes for k in rounds for episodes in rounds[k])]
    return finished(state, after, collected, metrics, update_metrics)
