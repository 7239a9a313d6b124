"""Sampling of stored transitions for an iteration's gradient steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from metaloom.pipeline.algorithms.off_policy.settings import OffPolicyPlan
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import ITERATION, At, Stage
from metaloom.pipeline.replay.index import DrawableRows, ReplayError, ReplayView
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, Minibatches, TaskBatch
from metaloom.stages.memory.replay import BEFORE_ITERATIONS, Collected, StoredReplay, plan_of


def sample_transitions(config: RunConfig, replay: StoredReplay, at: At, *, rounds: SpanOutputs) -> Minibatches:
    """Draw replay buffer rows for an iteration's gradient steps, reading only episode lengths."""

    def collected(ref: StageRef, num_tasks: int) -> Collected:
        iteration = BEFORE_ITERATIONS if ref.stage == "fill_memory" else ref.iteration
        return Collected(iteration, np.zeros(num_tasks, np.int64), in_context=False)

    current = (ref for ref in rounds.refs(at.iteration) if ref.stage != "fill_memory")
    num_env_steps = sum(int(rounds.lengths(ref).sum()) for ref in current)
    return _drawn(config, replay.view(rounds, collected), at, num_env_steps, [0])


def sample_transitions_of_tasks(
    config: RunConfig,
    replay: StoredReplay,
    training_tasks: TaskBatch,
    at: At,
    *,
    rounds: SpanOutputs,
    tasks: SpanOutputs,
) -> Minibatches:
    """Draw tasks for an iteration's gradient steps, and rows from each task's replay buffer and context."""

    @cache
    def ids(iteration: int) -> Array:
        (drawn,) = tasks.refs(iteration)
        return tasks.load(drawn).ids

    def collected(ref: StageRef, num_tasks: int) -> Collected:
        if ref.stage == "fill_memory":  # contains all tasks in order
            return Collected(BEFORE_ITERATIONS, np.arange(num_tasks), in_context=True)
        return Collected(ref.iteration, ids(ref.iteration), plan_of(config).rounds[ref.step].in_context)

    return _drawn(config, replay.view(rounds, collected), at, 0, range(len(training_tasks)))


def _drawn(config: RunConfig, view: ReplayView, at: At, num_env_steps: int, task_ids: Sequence[int]) -> Minibatches:
    plan = plan_of(config)
    most = plan.gradient_steps(config.episodes_per_task * config.max_episode_steps)
    return draw_transitions(view, plan, at, task_ids, num_updates=plan.gradient_steps(num_env_steps), max_updates=most)


SAMPLE_TRANSITIONS = Stage(
    sample_transitions, ITERATION, reads={"rounds": "history"}, group="minibatches", thinnable=True
)
SAMPLE_TRANSITIONS_OF_TASKS = replace(
    SAMPLE_TRANSITIONS, run=sample_transitions_of_tasks, reads={"rounds": "history", "tasks": "all_tasks"}
)


def draw_transitions(
    view: ReplayView, plan: OffPolicyPlan, at: At, task_ids: Sequence[int], *, num_updates: int, max_updates: int
) -> Minibatches:
    """Draw K distinct tasks per gradient step and, per task, N training transitions and C context transitions.

    Transitions are drawn uniformly with replacement from a task's newest `plan.memory_size` rows.
    Context is drawn separately, uniformly from the task's context rows, without replacement if there are at least C.
    The draws of a gradient step do not depend on the number of later steps. The result has entries for
    U = `max_updates` gradient steps; those after the first `num_updates` are -1.

    Raises:
        ReplayError: there are fewer tasks than K or more gradient steps than U, or a task has nothing to draw from.
    """
    where, num_tasks = f"sample_transitions of iteration {at.iteration}", plan.tasks_per_gradient_step
    if len(set(task_ids)) < num_tasks:
        raise ReplayError(
            f"{where}: got {len(set(task_ids))} training tasks; each gradient step requires at least {num_tasks}. "
            "Use fewer tasks per gradient step or add training tasks to the environment"
        )
    if not 1 <= num_updates <= max_updates:
        raise ReplayError(f"{where}: got {num_updates} gradient steps; expected 1 to {max_updates}")
    buffers = {task: view.rows(task, plan.memory_size) for task in task_ids}
    contexts = {task: view.context(task) for task in task_ids if plan.context_size}
    _require_rows(where, "replay buffer", buffers)
    _require_rows(where, "context", contexts)

    # Each gradient step's tasks [u, K] are the first K of a random order.
    order = generator(at.run_seed, "minibatches", at.iteration, 0).random((num_updates, len(task_ids)))
    chosen = order.argsort(axis=1, kind="stable")[:, :num_tasks]
    drawn = np.asarray(task_ids)[chosen].astype(np.int64)

    def draw(
        purpose: int, count: int, choices: dict[int, DrawableRows], pick: Callable[[Array, DrawableRows], Array]
    ) -> Array:
        uniforms = generator(at.run_seed, "minibatches", at.iteration, purpose).random((num_updates, num_tasks, count))
        rows = np.full((max_updates, num_tasks, count), -1, np.int64)
        for task in np.unique(drawn).tolist():
            of_task = drawn == task
            rows[:num_updates][of_task] = pick(uniforms[of_task], choices[task])
        return rows

    return Minibatches(
        rows=draw(1, plan.batch_size, buffers, _with_replacement),
        task_ids=np.concatenate([drawn, np.full((max_updates - num_updates, num_tasks), -1)]),
        context_rows=draw(2, plan.context_size, contexts, _distinct_if_possible) if plan.context_size else None,
    )


def _require_rows(where: str, what: str, choices: dict[int, DrawableRows]) -> None:
    if empty := [task for task, rows in choices.items() if not len(rows)]:
        raise ReplayError(
            f"{where}: the {what} of {len(empty)} of {len(choices)} tasks is empty, starting with task {empty[0]}; "
            "every task needs at least one transition. Fill it for every training task before the first update"
        )


def _with_replacement(uniforms: Array, choice: DrawableRows) -> Array:
    return choice.at(draw_with_replacement(uniforms, len(choice)))


def _distinct_if_possible(uniforms: Array, choice: DrawableRows) -> Array:
    if len(choice) < uniforms.shape[1]:
        return _with_replacement(uniforms, choice)
    return choice.at(draw_distinct(uniforms, np.full(len(uniforms), len(choice))))


_BLOCK = 4096  # number of sets drawn at once, chosen to stay in the CPU cache


def draw_with_replacement(uniforms: Array, sizes: Array | int) -> Array:
    """Map uniform draws in [0, 1) to int64 integers below `sizes`, which are broadcast."""
    return (uniforms * sizes).astype(np.int64)


def draw_distinct(uniforms: Array, sizes: Array) -> Array:
    """Draw S uniformly random sets of C distinct integers, [S, C] int64; set s is drawn from 0 ... `sizes[s]` - 1.

    Floyd's algorithm: Bentley and Floyd 1987, "A sample of brilliance", Communications of the ACM 30(9). Its cost does
    not depend on the sizes. The order within a set is not uniform. `uniforms` are draws in [0, 1), [S, C] float64; each
    of the `sizes` [S] must be at least C and below 2**31.
    """
    size, drawn = uniforms.shape[1], np.empty(uniforms.shape, np.int64)
    for first in range(0, len(uniforms), _BLOCK):
        block, tops = uniforms[first : first + _BLOCK], sizes[first : first + _BLOCK] - size
        chosen = np.empty((size, len(block)), np.int32)
        for n in range(size):
            candidate = (block[:, n] * (tops + n + 1)).astype(np.int32)
            taken = (chosen[:n] == candidate).any(axis=0)
            chosen[n] = np.where(taken, tops + n, candidate)
        drawn[first : first + _BLOCK] = chosen.T
    return drawn
