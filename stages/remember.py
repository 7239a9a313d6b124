"""Adaptation by memory of the episodes of every task."""

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
    """Return the parameters of every task with the memory of a rollout batch, whose episodes are one trial per task.

    In training an actor remembers by itself, through the episodes of a trial.
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
