"""Adaptation by inference: the posterior over every task, given episodes of it."""

from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import At, Per, Stage
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, TaskParams, Update
from metaloom.stages.counters import require_params
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.tools import at_start


def infer_task(
    learner: Learner[Any, Any],
    at: At,
    parallel: ParallelMap,
    *,
    state: Update,
    episodes: tuple[EpisodeBatch, ...],
) -> TaskParams:
    """Return the posterior over every task, the only part of a task's acting that adaptation changes.

    Training draws transitions of the episodes; after training, all of them count.
    """
    position = (at.run_seed, at.iteration, at.step) if at.training else None
    evidence = ContextRounds(episodes, position)
    found = learner.adapt(at_start(learner, state, at), TaskParams({}), evidence, parallel=parallel)
    return require_params(found, len(episodes[0].lengths), learner, "adaptation by")


def _before_posterior(config: RunConfig, i: int) -> list[int]:
    return [k - 1 for k, part in enumerate(plan_of(config).rounds) if part.from_posterior]


def _in_context(config: RunConfig, i: int) -> list[int]:
    return [k for k, part in enumerate(plan_of(config).rounds) if part.in_context]


ROUND = Per("per round", lambda config, i: range(len(plan_of(config).rounds)), stepped=True)
IN_CONTEXT = Per("per round that tasks are inferred from", _in_context, stepped=True)
INFER_TASK = Stage(
    infer_task,
    Per("before rounds by the posterior", _before_posterior, stepped=True),
    name="adapt",
    reads={"state": "learner", "episodes": "context"},
    group="adapted_{step}",
    thinnable=True,
)
