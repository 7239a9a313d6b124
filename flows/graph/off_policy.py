"""Off-policy runs: an update learns from transitions of all iterations so far, so the store is the replay buffer.

What a stage reads of earlier iterations is a Span: `sample_transitions` reads the lengths of episodes, `update` the
batches that hold the rows that were drawn. What of them is in memory is not read again, which changes no bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from metaloom.flows.graph.common import (
    INITIALIZE,
    SAMPLE_TASKS,
    draw_tasks,
    evaluated,
    evaluation,
    position,
    state_before,
)
from metaloom.flows.graph.context import Context
from metaloom.flows.graph.outputs import SpanOutputs
from metaloom.flows.graph.replay import BEFORE_ITERATIONS, Collected, StoredReplay
from metaloom.flows.graph.stage import ITERATION, ONCE, Graph, Input, Stage
from metaloom.pipeline.algorithms.off_policy.learner import OffPolicyLearner
from metaloom.pipeline.algorithms.off_policy.settings import OffPolicyPlan, OffPolicySettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns
from metaloom.pipeline.types import EpisodeBatch, Minibatch, Minibatches, TaskBatch, TaskParams, Update
from metaloom.stages.sample_transitions import sample_transitions
from metaloom.stages.update import update
from metaloom.storage import Span, StageRef

MIB = 2**20


def plan_of(config: RunConfig) -> OffPolicyPlan:
    """Return the plan of a run's rollouts and gradient steps."""
    assert isinstance(config.algorithm, OffPolicySettings), "a table for other algorithms"
    return config.algorithm.plan(episodes_per_task=config.episodes_per_task, max_episode_steps=config.max_episode_steps)


def replay_of(context: Context, num_buffers: int) -> StoredReplay:
    """Return the replay buffer, with one part for each of `num_buffers` tasks. It lasts as long as the context."""
    config, setup = context.config, context.setup
    most_rows = plan_of(config).most_transitions(
        iterations=config.iterations,
        num_tasks=config.num_tasks,
        all_tasks=num_buffers,
        max_episode_steps=config.max_episode_steps,
    )
    build = lambda: StoredReplay(  # noqa: E731
        ReplayBuffer(
            TransitionColumns(setup.observation_size, setup.action_size),
            cache_bytes=config.replay.cache_mib * MIB,
            max_rows=most_rows,
        )
    )
    return context.keep("replay", build)


def draw_transitions(
    context: Context,
    replay: StoredReplay,
    rounds: SpanOutputs,
    collected: Callable[[StageRef, int], Collected],
    *,
    num_env_steps: int,
    task_ids: Sequence[int],
) -> Minibatches:
    """Draw rows for the gradient steps of a span's last iteration, given its number of environment steps."""
    config, plan = context.config, plan_of(context.config)
    return sample_transitions(
        replay.view(rounds, collected),
        num_updates=plan.gradient_steps(num_env_steps),
        max_updates=plan.gradient_steps(config.episodes_per_task * config.max_episode_steps),
        task_ids=task_ids,
        num_tasks=plan.tasks_per_gradient_step,
        batch_size=plan.batch_size,
        context_size=plan.context_size,
        buffer_size=plan.memory_size,
        run_seed=config.seed,
        iteration=rounds.span.last,
    )


def begins_from(i: int) -> Mapping[str, Input]:
    """Return the learner that iteration i starts from."""
    return state_before(UPDATE, i)


def all_rounds(i: int) -> Mapping[str, Input]:
    """Return everything collected so far as an input."""
    return {"rounds": Span((FILL_MEMORY.name, COLLECT_ROLLOUTS.name), 0, i)}


def learns_from(i: int, episodes: StageRef | tuple[StageRef, ...]) -> Mapping[str, Input]:
    """Return the inputs of an update. The iteration's own episodes, and the first one's fill, only feed its metrics."""
    own = {"episodes": episodes} | ({} if i else {"fill": FILL_MEMORY.at(0)})
    return {**begins_from(i), **all_rounds(i), "drawn": SAMPLE_TRANSITIONS.at(i), **own}


def learned(
    context: Context,
    i: int,
    state: Update,
    minibatches: Iterable[Minibatch],
    rounds: Mapping[int, Sequence[EpisodeBatch]],
    fill: EpisodeBatch | None,
) -> Update:
    """Update the learner in iteration i; see `update`."""
    return update(
        context.learner,
        context.start(state),
        minibatches,
        rounds,
        fill=[] if fill is None else [fill],
        run_seed=context.config.seed,
        iteration=i,
        parallel=context.parallel,
        measures=context.measures,
    )


def _fill_memory(context: Context, i: int, k: int, *, state: Update) -> EpisodeBatch:
    """Collect episodes with actions drawn uniformly, or with a policy that was trained before."""
    config, filling = context.config, plan_of(context.config).filling
    tasks = draw_tasks(context, i)
    learner = cast(OffPolicyLearner[Any, Any], context.learner)
    params = TaskParams({}) if filling.actor == "uniform" else learner.filling_params(state.learner, len(tasks))
    assert filling.steps is not None, "the buffer of a single task is filled by steps"
    rollouts = context.rollouts.filling(filling.steps, actor=filling.actor)
    return rollouts.collect(params, tasks, position(config, BEFORE_ITERATIONS, k))


def _collect_rollouts(context: Context, i: int, k: int, *, state: Update, tasks: TaskBatch) -> EpisodeBatch:
    params = context.learner.acting_params(context.start(state), len(tasks))
    return context.rollouts.collect(params, tasks, position(context.config, i, k))


def _sample_transitions(context: Context, i: int, k: int, *, rounds: SpanOutputs) -> Minibatches:
    num_env_steps = int(rounds.lengths(COLLECT_ROLLOUTS.at(i, k)).sum())
    return draw_transitions(context, _replay(context), rounds, _collected, num_env_steps=num_env_steps, task_ids=[0])


def _collected(ref: StageRef, num_tasks: int) -> Collected:
    iteration = BEFORE_ITERATIONS if ref.stage == FILL_MEMORY.name else ref.iteration
    return Collected(iteration, np.zeros(num_tasks, np.int64), in_context=False)


def _update(
    context: Context,
    i: int,
    k: int,
    *,
    state: Update,
    rounds: SpanOutputs,
    drawn: Minibatches,
    episodes: EpisodeBatch,
    fill: EpisodeBatch | None = None,
) -> Update:
    return learned(context, i, state, _replay(context).minibatches(rounds, drawn), {0: [episodes]}, fill)


def _replay(context: Context) -> StoredReplay:
    return replay_of(context, 1)


FILL_MEMORY = Stage(
    "fill_memory",
    ONCE,
    lambda config, i, k: {"state": INITIALIZE.at(0)},
    EpisodeBatch,
    _fill_memory,
    group="memory_fill",
    samples=True,
)
COLLECT_ROLLOUTS = Stage(
    "collect_rollouts",
    ITERATION,
    lambda config, i, k: {**begins_from(i), "tasks": SAMPLE_TASKS.at(i)},
    EpisodeBatch,
    _collect_rollouts,
    group="rollouts_{step}",
    samples=True,
)
SAMPLE_TRANSITIONS = Stage(
    "sample_transitions",
    ITERATION,
    lambda config, i, k: all_rounds(i),
    Minibatches,
    _sample_transitions,
    group="minibatches",
    thinnable=True,
)
UPDATE = Stage(
    "update",
    ITERATION,
    lambda config, i, k: learns_from(i, COLLECT_ROLLOUTS.at(i)),
    Update,
    _update,
    group="learner",
    ends_iteration=True,
)
OFF_POLICY = Graph(
    "off_policy",
    (INITIALIZE, FILL_MEMORY, SAMPLE_TASKS, COLLECT_ROLLOUTS, SAMPLE_TRANSITIONS, UPDATE, evaluation(UPDATE)),
    evaluated,
)
