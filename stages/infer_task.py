"""Adaptation by inferring each task's posterior from its episodes."""

from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import At, Per, Stage
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, TaskParams, Update
from metaloom.stages.counters import require_params
from metaloom.stages.memory.replay import plan_of


def infer_task(
    learner: Learner[Any, Any], at: At, parallel: ParallelMap, *, state: Update, episodes: tuple[EpisodeBatch, ...]
) -> TaskParams:
    """Return each task's posterior, the only task parameters that adaptation changes.

    Training conditions on a random sample of the transitions, evaluation on all of them.
    """
    position = (at.run_seed, at.iteration, at.step) if at.training else None
    start = learner.at_start(state.learner, run_seed=at.run_seed)
    found = learner.adapt(start, TaskParams({}), ContextRounds(episodes, position), parallel=parallel)
    return require_params(found, len(episodes[0].lengths), learner, "adaptation by")


ROUND = Per("per rollout batch", lambda config, i: range(len(plan_of(config).rounds)), stepped=True)
IN_CONTEXT = Per(
    "per rollout batch that tasks are inferred from",
    lambda config, i: [k for k, part in enumerate(plan_of(config).rounds) if part.in_context],
    stepped=True,
)
BEFORE_POSTERIOR = Per(
    "before rollout batches by the posterior",
    lambda config, i: [k - 1 for k, part in enumerate(plan_of(config).rounds) if part.from_posterior],
    stepped=True,
)
INFER_TASK = Stage(
    infer_task,
    BEFORE_POSTERIOR,
    name="adapt",
    reads={"state": "learner", "episodes": "context"},
    group="adapted_{step}",
    thinnable=True,
)
