"""Runs that infer their tasks between rollout batches, such as PEARL.

A task is inferred from its episodes in the current iteration. Learning uses the episodes of all iterations.
"""

import numpy as np

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.edges import last_step, since_start, steps_so_far
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.tasks.samplers import fixed_tasks
from metaloom.stages.adapt import IN_CONTEXT, INFER_TASK
from metaloom.stages.collect_rollouts import COLLECT_ROUND
from metaloom.stages.evaluate import EVALUATE_INFERENCE
from metaloom.stages.fill_memory import FILL_MEMORY_OF_ALL_TASKS
from metaloom.stages.graphs.off_policy import OFF_POLICY
from metaloom.stages.initialize import INITIALIZE
from metaloom.stages.memory.replay import plan_of, replay_of_all_tasks, training_tasks
from metaloom.stages.sample_tasks import SAMPLE_TRAINING_TASKS
from metaloom.stages.sample_transitions import SAMPLE_TRANSITIONS_OF_TASKS
from metaloom.stages.update import UPDATE


def check_tasks(config: RunConfig, env: MetaEnv) -> None:
    """Raise ConfigError or EnvError unless the environment's training set suits task inference.

    A batch must not need more tasks than the set contains, and task sampling must not be balanced. If evaluations score
    sparse rewards, the environment must provide them.
    """
    num_train_tasks, plan = len(fixed_tasks(env)), plan_of(config)
    if config.task_sampling != "uniform":
        raise ConfigError(
            f"task_sampling must be uniform, got {config.task_sampling}: {config.algorithm.name} draws uniformly from "
            "a fixed training set"
        )
    asked = {"num_tasks": config.num_tasks, "algorithm.meta_batch_size": plan.tasks_per_gradient_step}
    for name, number in asked.items():
        if number > num_train_tasks:
            raise ConfigError(
                f"{name} is {number} but {config.env.name} has {num_train_tasks} training tasks, which are drawn "
                "without replacement; use at most that many"
            )
    if plan.scores_sparse_rewards:
        env.sparse_rewards(np.zeros(0, np.float32))


TASK_INFERENCE = Graph(
    "task_inference",
    (
        INITIALIZE,
        FILL_MEMORY_OF_ALL_TASKS,
        SAMPLE_TRAINING_TASKS,
        COLLECT_ROUND,
        INFER_TASK,
        SAMPLE_TRANSITIONS_OF_TASKS,
        UPDATE,
        EVALUATE_INFERENCE,
    ),
    edges={
        **OFF_POLICY.edges,
        "posterior": last_step(INFER_TASK),
        "context": steps_so_far(COLLECT_ROUND, among=IN_CONTEXT),
        "all_tasks": since_start(SAMPLE_TRAINING_TASKS),
    },
    shared={"replay": replay_of_all_tasks, "training_tasks": training_tasks},
    remembers_by_task=True,
    check=check_tasks,
)
