"""Adaptation of every task's parameters by one inner step on the task's episodes."""

from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import INNER_STEP, At, Stage
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, Samples, Step, TaskParams, Update
from metaloom.stages.counters import require_params
from metaloom.stages.tools import acting_params


def adapt(
    learner: Learner[Any, Any],
    at: At,
    parallel: ParallelMap,
    *,
    state: Update,
    params: Update | TaskParams,
    episodes: EpisodeBatch,
    samples: Samples,
) -> TaskParams:
    """Return the parameters of every task after one inner step on its own samples, [B, ...]."""
    num_tasks = len(episodes.lengths)
    before = acting_params(learner, params, at, num_tasks)
    evidence = Step(episodes, samples, at.step)
    found = learner.adapt(learner.at_start(state.learner, run_seed=at.run_seed), before, evidence, parallel=parallel)
    return require_params(found, num_tasks, learner, "adaptation by", like=before)


ADAPT = Stage(
    adapt,
    INNER_STEP,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts", "samples": "samples"},
    group="adapted_{step}",
    thinnable=True,
)
