"""Gradient steps of an off-policy algorithm, which end an iteration."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.stage import ITERATION, At, Stage
from metaloom.pipeline.estimation.diagnostics import Measures, episode_metrics, with_own
from metaloom.pipeline.types import EpisodeBatch, Metrics, Minibatch, Minibatches, ParallelMap, Update
from metaloom.stages.counters import updated
from metaloom.stages.memory.replay import StoredReplay, plan_of


def update(
    learner: Learner[Any, Iterable[Minibatch]],
    at: At,
    parallel: ParallelMap,
    measures: Measures,
    config: RunConfig,
    replay: StoredReplay,
    *,
    state: Update,
    rounds: SpanOutputs,
    drawn: Minibatches,
    episodes: tuple[EpisodeBatch, ...],
    fill: EpisodeBatch | None = None,
) -> Update:
    """Compute the next learner from the drawn transitions, and the metrics of this iteration's episodes.

    Names of episode metrics end with the number of task inferences: 0 under the prior, 1 after inference. The initial
    fill of the replay buffer counts only toward environment steps.
    """
    by_posterior: dict[int, list[EpisodeBatch]] = {}
    for batch, part in zip(episodes, plan_of(config).rounds, strict=True):
        by_posterior.setdefault(int(part.from_posterior), []).append(batch)
    collected, metrics = ([] if fill is None else [fill]), Metrics()
    for k, batches in by_posterior.items():
        collected += batches
        metrics |= with_own(episode_metrics(batches, k), measures.of_round(batches, k))
    # Non-finite parameters are reported at the end, with a better message than NumPy's warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        experience = replay.minibatches(rounds, drawn)
        return updated(learner, at, parallel, state=state, experience=experience, rounds=collected, metrics=metrics)


UPDATE = Stage(
    update,
    ITERATION,
    reads={"state": "learner", "rounds": "history", "drawn": "drawn", "episodes": "all_rollouts", "fill": "fill"},
    group="learner",
    ends_iteration=True,
)
