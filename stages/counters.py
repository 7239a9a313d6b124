"""Checks of what a learner returns, and the counters that it keeps over a whole run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, ParallelMap, Params, TaskParams, Update
from metaloom.stages.faults import StageFault

ENV_STEPS = "env_steps"
"""Environment steps made so far."""

ENV_STEPS_NOMINAL = "env_steps_nominal"
"""Environment steps there would have been if no episode had ended before its step limit."""


def no_steps() -> Params:
    """Return the counters before the first episode."""
    return {name: np.zeros((), np.int64) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}


def require_adapted(found: object, num_tasks: int, learner: Learner[Any, Any]) -> TaskParams:
    """Return the adapted parameters that a learner gave, after checking that they cover `num_tasks` tasks.

    Raises:
        StageFault: the result is not parameters, or covers more or fewer tasks.
    """
    required = f"required TaskParams of {num_tasks} tasks, what each of them acts with"
    if not isinstance(found, TaskParams):
        raise StageFault(f"adaptation by {_name(learner)} gave {type(found).__name__}; {required}")
    for name, value in found.params.items():
        if len(value) != num_tasks:
            raise StageFault(f"adaptation by {_name(learner)} gave params[{name!r}] of {len(value)} tasks; {required}")
    return found


def updated(
    learner: Learner[Any, Any],
    at: At,
    parallel: ParallelMap,
    *,
    state: Update,
    experience: object,
    rounds: Sequence[EpisodeBatch],
    metrics: Metrics,
) -> Update:
    """Update a learner that has counted the episodes of some rollout batches; the counters are metrics too.

    Raises:
        StageFault: the result is not a learner state with numeric metrics; and as `finished`.
    """
    before = learner.at_start(state.learner, run_seed=at.run_seed)
    found: object = learner.update(before, experience, run_seed=at.run_seed, iteration=at.iteration, parallel=parallel)
    match found:
        case (LearnerState() as after, Mapping() as described):
            of_update = {name: _number(name, value) for name, value in described.items()}
        case _:
            kinds = f"({', '.join(type(part).__name__ for part in found)})" if isinstance(found, tuple) else ""
            raise StageFault(
                f"the update of {_name(learner)} gave {kinds or type(found).__name__}; required (LearnerState, "
                "metrics), with the metrics a mapping from names to numbers"
            )
    return finished(before, after, rounds, metrics, of_update)


def finished(
    state: LearnerState, updated: LearnerState, rounds: Sequence[EpisodeBatch], metrics: Metrics, of_update: Metrics
) -> Update:
    """Return an update whose learner has counted the episodes of some rollout batches. The counters are metrics too.

    Raises:
        StageFault: the learner gave parameters of another form, with which no iteration could begin, or metrics under
            names that the run always has.
    """
    before, after = (
        {name: f"{value.dtype}{list(value.shape)}" for name, value in one.params.items()} for one in (state, updated)
    )
    if other := sorted(name for name in before | after if before.get(name) != after.get(name)):
        found, required = (form.get(other[0], "absent") for form in (after, before))
        raise StageFault(f"the update gave params[{other[0]!r}] as {found}; required {required}, as it was before")
    made = sum(episodes.num_steps for episodes in rounds)
    nominal = sum(int(episodes.real.sum()) * episodes.rewards.shape[2] for episodes in rounds)
    counters: Params = {
        ENV_STEPS: np.array(int(state.extra[ENV_STEPS]) + made, np.int64),
        ENV_STEPS_NOMINAL: np.array(int(state.extra[ENV_STEPS_NOMINAL]) + nominal, np.int64),
    }
    numbers = {name: float(count) for name, count in counters.items()}
    if taken := sorted((metrics | numbers).keys() & of_update.keys()):
        raise StageFault(
            f"the update gave the metrics {', '.join(taken)}, which every run has; return them under other names"
        )
    learner = LearnerState(updated.params, updated.optimizer, updated.extra | counters)
    return Update(learner, {**metrics, **of_update, **numbers})


def _name(learner: Learner[Any, Any]) -> str:
    return path_of(type(learner.unwrapped))


def _number(name: object, value: Any) -> float:
    """Return a metric as it is stored; anything else would come back as something else."""
    if isinstance(value, int | float | np.number | np.bool) or getattr(value, "shape", None) == ():
        return float(value)
    raise StageFault(f"the update gave the metric {name!r} as {value!r}; required one number, as in float(loss)")
