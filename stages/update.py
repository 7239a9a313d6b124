"""The gradient steps that end an iteration of an off-policy algorithm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.pipeline.estimation.diagnostics import episode_metrics
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, Minibatch, ParallelMap, Update
from metaloom.stages.counters import counted


def update(
    policy: Any,
    algorithm: Any,
    learner: LearnerState,
    minibatches: Iterable[Minibatch],
    rounds: Mapping[int, Sequence[EpisodeBatch]],
    *,
    fill: Sequence[EpisodeBatch] = (),
    run_seed: int,
    iteration: int,
    parallel: ParallelMap = map,
) -> Update:
    """The learner of the next iteration, and the metrics of this one.

    Args:
        policy: the policy.
        algorithm: the gradient steps.
        learner: input of this iteration.
        minibatches: what each gradient step learns from, in order.
        rounds: the episodes that this iteration collected, by how often their actors had inferred the task: 0 for those
            that acted by what holds for every task, 1 for those that acted by what they had seen of theirs.
        fill: episodes that filled the replay buffer before; they count as environment steps.
        run_seed: with the iteration, decides the noise of the gradient steps.
        iteration: the number of this iteration.
        parallel: maps over parts of a minibatch; the result does not depend on it.
    """
    # Parameters that are not finite are found at the end, and told better than by a warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        updated, update_metrics = algorithm.update(
            policy, learner, minibatches, run_seed=run_seed, iteration=iteration, parallel=parallel
        )
    counters = counted(learner, [*fill, *(episodes for k in rounds for episodes in rounds[k])])
    metrics: Metrics = {}
    for k, collected in rounds.items():
        metrics |= episode_metrics(collected, k)
    metrics |= update_metrics | {name: float(count) for name, count in counters.items()}
    return Update(LearnerState(updated.params, updated.optimizer, updated.extra | counters), metrics)
