"""Adaptation through the actor's memory of each task's episodes."""

from dataclasses import replace
from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import AFTER_TRAINING, At
from metaloom.pipeline.types import EpisodeBatch, TaskParams, Update
from metaloom.stages.adapt import ADAPT
from metaloom.stages.counters import require_params
from metaloom.stages.tools import acting_params


def remember(
    learner: Learner[Any, Any], at: At, *, state: Update, params: Update | TaskParams, episodes: EpisodeBatch
) -> TaskParams:
    """Return the task parameters with the actor's memory of a rollout batch that holds one trial per task.

    Training does not need this: there an actor keeps its memory through the episodes of a trial.
    """
    before = acting_params(learner, params, at, len(episodes.lengths))
    found = learner.adapt(learner.at_start(state.learner, run_seed=at.run_seed), before, episodes)
    return require_params(found, len(episodes.lengths), learner, "adaptation by")


REMEMBER = replace(
    ADAPT,
    run=remember,
    per=AFTER_TRAINING,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts"},
)
