"""Collection of an off-policy run's first episodes, which fill its replay buffer before the first update."""

from dataclasses import replace
from typing import Any, cast

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.algorithms.off_policy.learner import OffPolicyLearner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import ONCE, At, Stage
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams, Update
from metaloom.stages.memory.replay import BEFORE_ITERATIONS, plan_of
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.stages.sample_tasks import sample_tasks
from metaloom.stages.tools import Rollouts, acting_params


def fill_memory(
    learner: AnyLearner, config: RunConfig, env: MetaEnv, rollouts: Rollouts, at: At, *, state: Update
) -> EpisodeBatch:
    """Collect the episodes that fill the buffer, with uniformly random actions or a pretrained policy."""
    filling, tasks = plan_of(config).filling, sample_tasks(env, config, at)
    params = TaskParams({})
    if filling.actor != "uniform":
        params = cast(OffPolicyLearner[Any, Any], learner).filling_params(state.learner, len(tasks))
    assert filling.steps is not None, "the buffer of a single task is filled by steps"
    return rollouts.filling(filling.steps, actor=filling.actor).collect(
        params, tasks, RolloutPosition(at.run_seed, BEFORE_ITERATIONS, at.step)
    )


def fill_memory_of_all_tasks(
    learner: AnyLearner, config: RunConfig, training_tasks: TaskBatch, rollouts: Rollouts, at: At, *, state: Update
) -> EpisodeBatch:
    """Collect episodes for every training task, with latents drawn from the prior."""
    episodes = plan_of(config).filling.episodes
    assert episodes is not None, "the buffers of training tasks are filled by episodes"
    params = acting_params(learner, state, at, len(training_tasks))
    return rollouts.sampling(episodes, deterministic=False).collect(
        params, training_tasks, RolloutPosition(at.run_seed, BEFORE_ITERATIONS, at.step)
    )


FILL_MEMORY = Stage(fill_memory, ONCE, reads={"state": "initial"}, group="memory_fill", samples=True)
FILL_MEMORY_OF_ALL_TASKS = replace(FILL_MEMORY, run=fill_memory_of_all_tasks)
