"""The gradient steps that end an iteration of an off-policy algorithm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.estimation.diagnostics import episode_metrics
from metaloom.pipeline.estimation.measures import NO_MEASURES, Measures, with_own
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
    """The learner state of the next iteration, and the metrics of this one.

    Args:
        learner: the algorithm.
        state: input of this iteration.
        minibatches: what each gradient step learns from, in order.
        rounds: the episodes that this iteration collected, by how often their actors had inferred the task: 0 for those
            that acted by what holds for every task, 1 for those that acted by what they had seen of theirs.
        fill: episodes that filled the replay buffer before; they count as environment steps.
        run_seed: with the iteration, decides the noise of the gradient steps.
        iteration: the number of this iteration.
        parallel: maps over parts of a minibatch; the result does not depend on it.
        measures: what else is measured of every round.
    """
    # Parameters that are not finite are found at the end, and told better than by a warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        after, update_metrics = updated(
            learner, state, minibatches, run_seed=run_seed, iteration=iteration, parallel=parallel
        )
    metrics: Metrics = {}
    for k, episodes in rounds.items():
        metrics |= with_own(episode_metrics(episodes, k), measures.of_round(episodes, k))
    collected = [*fill, *(episodes for k in rounds for episodes in rounds[k])]
    return finished(state, after, collected, metrics, update_metrics)
