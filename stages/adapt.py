"""Per-task adaptation from the task's episodes, by an inner step or through the actor's memory."""

from dataclasses import replace
from functools import partial
from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import AFTER_TRAINING, INNER_STEP, At, Stage
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
    samples: Samples | None,
) -> TaskParams:
    """Return each task's parameters after one inner step on the task's samples, [B, ...].

    Without samples, the parameters contain the actor's memory after a rollout batch of one trial per task. Training
    does not need this, because an actor there keeps its memory across the episodes of a trial.
    """
    num_tasks = len(episodes.lengths)
    before = acting_params(learner, params, at, num_tasks)
    evidence = episodes if samples is None else Step(episodes, samples, at.step)
    found = learner.adapt(learner.at_start(state.learner, run_seed=at.run_seed), before, evidence, parallel=parallel)
    return require_params(found, num_tasks, learner, "adaptation by", like=None if samples is None else before)


ADAPT = Stage(
    adapt,
    INNER_STEP,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts", "samples": "samples"},
    group="adapted_{step}",
    thinnable=True,
)
REMEMBER = replace(
    ADAPT,
    run=partial(adapt, samples=None),
    per=AFTER_TRAINING,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts"},
)
