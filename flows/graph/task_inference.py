"""Runs that infer their tasks, as PEARL does: rollout batches with a posterior over the task between them.

A task is inferred from what an iteration has collected of it. Learning uses everything that was ever
collected. The stages around the replay buffer are the off-policy ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from metaloom.flows.graph import off_policy
from metaloom.flows.graph.common import INITIALIZE, evaluated, evaluation, position
from metaloom.flows.graph.context import Context
from metaloom.flows.graph.off_policy import (
    all_rounds,
    begins_from,
    draw_transitions,
    learned,
    learns_from,
    plan_of,
    replay_of,
)
from metaloom.flows.graph.outputs import SpanOutputs
from metaloom.flows.graph.replay import BEFORE_ITERATIONS, Collected, StoredReplay
from metaloom.flows.graph.stage import ITERATION, Graph, Input, Per, Stage
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.tasks.samplers import TaskPool, distinct_tasks, fixed_tasks
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Minibatches,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.stages.counters import require_adapted
from metaloom.stages.evaluate import Tested, unseen
from metaloom.storage import Span, StageRef

ROUND = Per("per round", lambda config, i: range(len(plan_of(config).rounds)))
INFERENCE = Per(
    "before rounds by the posterior",
    lambda config, i: [k - 1 for k, part in enumerate(plan_of(config).rounds) if part.from_posterior],
)


def _seen(config: RunConfig, i: int, k: int) -> Mapping[str, Input]:
    """Return the inputs from an iteration's rollout batches up to k: those that tasks are inferred from."""
    rounds = plan_of(config).rounds[: k + 1]
    return {"episodes": tuple(COLLECT_ROLLOUTS.at(i, n) for n, part in enumerate(rounds) if part.in_context)}


def _inferred(config: RunConfig, i: int, k: int) -> Mapping[str, Input]:
    """Additional input of a rollout batch that acts by the posterior."""
    return {"posterior": ADAPT.at(i, k - 1)} if plan_of(config).rounds[k].from_posterior else {}


def _fill_memory(context: Context, i: int, k: int, *, state: Update) -> EpisodeBatch:
    """Collect episodes of every training task, by the prior."""
    config, tasks = context.config, _train_tasks(context)
    episodes = plan_of(config).filling.episodes
    assert episodes is not None, "the buffers of training tasks are filled by episodes"
    params = context.learner.acting_params(context.start(state), len(tasks))
    rollouts = context.rollouts.sampling(episodes, deterministic=False)
    return rollouts.collect(params, tasks, position(config, BEFORE_ITERATIONS, k))


def _sample_tasks(context: Context, i: int, k: int) -> TaskBatch:
    """Different tasks of the training set."""
    return distinct_tasks(context.env, context.config.num_tasks, generator(context.config.seed, "tasks", i))


def _collect_rollouts(
    context: Context, i: int, k: int, *, state: Update, tasks: TaskBatch, posterior: TaskParams | None = None
) -> EpisodeBatch:
    """Collect a rollout batch, by the prior or by the posterior after the last batch."""
    params = context.learner.acting_params(context.start(state), len(tasks))
    if posterior is not None:
        params = TaskParams({**params.params, **posterior.params})
    rollouts = context.rollouts.sampling(plan_of(context.config).rounds[k].episodes, deterministic=False)
    return rollouts.collect(params, tasks, position(context.config, i, k))


def _adapt(context: Context, i: int, k: int, *, state: Update, episodes: tuple[EpisodeBatch, ...]) -> TaskParams:
    """Infer the posterior over every task, the only part of a task's acting that adaptation changes."""
    evidence = ContextRounds(episodes, (context.config.seed, i, k))
    found = context.learner.adapt(context.start(state), TaskParams({}), evidence, parallel=context.parallel)
    return require_adapted(found, len(episodes[0].lengths), context.learner)


def _sample_transitions(context: Context, i: int, k: int, *, rounds: SpanOutputs, tasks: SpanOutputs) -> Minibatches:
    plan = plan_of(context.config)

    @cache
    def ids(iteration: int) -> Array:
        return tasks.load(SAMPLE_TASKS.at(iteration)).ids

    def collected(ref: StageRef, num_tasks: int) -> Collected:
        if ref.stage == FILL_MEMORY.name:  # which is of all tasks in their order
            return Collected(BEFORE_ITERATIONS, np.arange(num_tasks), in_context=True)
        return Collected(ref.iteration, ids(ref.iteration), plan.rounds[ref.step].in_context)

    all_tasks = range(len(_train_tasks(context)))
    return draw_transitions(context, _replay(context), rounds, collected, num_env_steps=0, task_ids=all_tasks)


def _update(
    context: Context,
    i: int,
    k: int,
    *,
    state: Update,
    rounds: SpanOutputs,
    drawn: Minibatches,
    episodes: tuple[EpisodeBatch, ...],
    fill: EpisodeBatch | None = None,
) -> Update:
    by_posterior: dict[int, list[EpisodeBatch]] = {}
    for batch, part in zip(episodes, plan_of(context.config).rounds, strict=True):
        by_posterior.setdefault(int(part.from_posterior), []).append(batch)
    return learned(context, i, state, _replay(context).minibatches(rounds, drawn), by_posterior, fill)


def _evaluate(context: Context, state: LearnerState, updates: int, tested: Tested = unseen) -> Evaluation:
    """Evaluate returns by the prior, and after inferring each task from 1 ... K rollout batches; see Evaluate.

    Episodes that a task is inferred from act deterministically where test episodes do: they explore by drawing what
    the task may be, not by drawing actions.
    """
    if not plan_of(context.config).scores_sparse_rewards:
        return evaluated(context, state, updates, tested, explores=False)

    def returns(episodes: EpisodeBatch) -> Array:
        return (context.env.sparse_rewards(episodes.rewards) * episodes.mask).sum(axis=2, dtype=np.float64)

    return evaluated(context, state, updates, tested, explores=False, returns=returns)


def _check(config: RunConfig, env: MetaEnv) -> None:
    """Refuse fewer training tasks than a batch needs at once.

    Raises:
        ConfigError: there are fewer, or balanced draws are requested.
        EnvError: the environment has no fixed set of them, or no sparse rewards where they are asked for.
    """
    num_train_tasks, plan = len(fixed_tasks(env)), plan_of(config)
    if config.task_sampling != "uniform":
        raise ConfigError(
            f"task_sampling is {config.task_sampling}, but {config.algorithm.name} learns from tasks of its whole "
            "training set, of which an iteration collects some; required task_sampling=uniform"
        )
    asked = {"num_tasks": config.num_tasks, "algorithm.meta_batch_size": plan.tasks_per_gradient_step}
    for name, number in asked.items():
        if number > num_train_tasks:
            raise ConfigError(
                f"{name} is {number} but {config.env.name} has {num_train_tasks} training tasks, none of which is "
                "taken twice at once; use at most that many"
            )
    if plan.scores_sparse_rewards:
        env.sparse_rewards(np.zeros(0, np.float32))


def _train_tasks(context: Context) -> TaskBatch:
    return context.keep("train tasks", lambda: TaskPool.of(context.env, fixed_tasks(context.env)).all())


def _replay(context: Context) -> StoredReplay:
    return replay_of(context, len(_train_tasks(context)))


FILL_MEMORY = replace(off_policy.FILL_MEMORY, run=_fill_memory)
SAMPLE_TASKS = Stage("sample_tasks", ITERATION, lambda config, i, k: {}, TaskBatch, _sample_tasks, group="tasks")
COLLECT_ROLLOUTS = replace(
    off_policy.COLLECT_ROLLOUTS,
    per=ROUND,
    inputs=lambda config, i, k: {**begins_from(i), "tasks": SAMPLE_TASKS.at(i), **_inferred(config, i, k)},
    run=_collect_rollouts,
)
ADAPT = Stage(
    "adapt",
    INFERENCE,
    lambda config, i, k: {**begins_from(i), **_seen(config, i, k)},
    TaskParams,
    _adapt,
    group="adapted_{step}",
    thinnable=True,
)
SAMPLE_TRANSITIONS = replace(
    off_policy.SAMPLE_TRANSITIONS,
    inputs=lambda config, i, k: {**all_rounds(i), "tasks": Span((SAMPLE_TASKS.name,), 0, i)},
    run=_sample_transitions,
)
UPDATE = replace(
    off_policy.UPDATE,
    inputs=lambda config, i, k: learns_from(i, tuple(COLLECT_ROLLOUTS.at(i, k) for k in ROUND.steps(config, i))),
    run=_update,
)
TASK_INFERENCE = Graph(
    "task_inference",
    (
        INITIALIZE,
        FILL_MEMORY,
        SAMPLE_TASKS,
        COLLECT_ROLLOUTS,
        ADAPT,
        SAMPLE_TRANSITIONS,
        UPDATE,
        evaluation(UPDATE, _evaluate),
    ),
    _evaluate,
    remembers_by_task=True,
    check=_check,
)
