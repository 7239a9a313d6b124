"""Checks of a learner's results, and the counters kept over a whole run."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, ParallelMap, Params, TaskParams, Update
from metaloom.stages.faults import StageFault

ENV_STEPS = "env_steps"  # number of environment steps so far

ENV_STEPS_NOMINAL = "env_steps_nominal"  # number of environment steps if every episode had reached its step limit


def no_steps() -> Params:
    """Return the counters before the first episode: zeros, keyed by name."""
    return {name: np.zeros((), np.int64) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}


def require_params(
    found: object, num_tasks: int, learner: AnyLearner, method: str, like: TaskParams | None = None
) -> TaskParams:
    """Return a learner's task parameters after checking that they fit `num_tasks` tasks.

    Raises StageFault if they are not TaskParams, cover the wrong number of tasks, or lack a name or shape of `like`.
    The message names the method that returned them.
    """
    required = f"expected TaskParams for {num_tasks} tasks, with each task's policy parameters"
    if not isinstance(found, TaskParams):
        raise _fault(method, learner, f"{type(found).__name__}; {required}")
    for name, value in found.params.items():
        if len(value) != num_tasks:
            raise _fault(method, learner, f"params[{name!r}] for {len(value)} tasks; {required}")
    for name, before in {} if like is None else like.params.items():
        if name not in found.params or found.params[name].shape != before.shape:
            shape = [*found.params[name].shape] if name in found.params else "absent"
            raise _fault(method, learner, f"params[{name!r}] as {shape}; expected {[*before.shape]}, as before")
    return found


def require_state(found: object, learner: AnyLearner, method: str, like: Params | None = None) -> LearnerState:
    """Return a learner's state after checking that it contains only arrays.

    Raises StageFault otherwise, or if a parameter's dtype differs from `like`; parameters not in `like` must be
    float32. If `like` is None, any dtype is allowed, as in runs of earlier versions. The message names the method that
    returned the state.
    """
    if not isinstance(found, LearnerState):
        raise _fault(method, learner, f"{type(found).__name__}; expected LearnerState(params, optimizer, extra)")
    for part in fields(found):
        for name, value in getattr(found, part.name).items():
            if not isinstance(value, np.ndarray | np.generic):
                result = f"{part.name}[{name!r}] as {type(value).__name__}"
                required = "a NumPy array, such as np.asarray(...) or tensor.numpy(), which the run can store"
                raise _fault(method, learner, f"{result}; expected {required}")
            if part.name == "params" and like is not None:
                required = like[name].dtype if name in like else np.dtype(np.float32)
                if value.dtype != required:
                    raise _fault(method, learner, f"params[{name!r}] as {value.dtype}; expected {required}")
    return found


def require_complete(update: object, before: Update, where: str) -> None:
    """Raise StageFault unless the stage that ends an iteration kept the run's counters and the state's arrays."""
    assert isinstance(update, Update)
    for name in no_steps():
        if name not in update.metrics or name not in update.learner.extra:
            raise StageFault(
                f"{where}: the stage lost the counter {name}; return it in the metrics and in learner.extra, "
                "as metaloom.stages.counters.updated does"
            )
    for part in ("optimizer", "extra"):
        if lost := getattr(before.learner, part).keys() - getattr(update.learner, part).keys():
            raise StageFault(f"{where}: the update returned no {part}[{min(lost)!r}], which the previous state has")


def updated(
    learner: AnyLearner,
    at: At,
    parallel: ParallelMap,
    *,
    state: Update,
    experience: object,
    rounds: Sequence[EpisodeBatch],
    metrics: Metrics,
) -> Update:
    """Update the learner, count the environment steps of the rollout batches, and add the counters to the metrics.

    Raises StageFault if the result is not a learner state with numeric metrics, its parameters have changed shape or
    dtype, or a metric's name is reserved.
    """
    before = learner.at_start(state.learner, run_seed=at.run_seed)
    found: object = learner.update(before, experience, run_seed=at.run_seed, iteration=at.iteration, parallel=parallel)
    match found:
        case (LearnerState() as after, Mapping() as described):
            require_state(after, learner, "update")
            of_update = {name: _number(name, value) for name, value in described.items()}
        case _:
            kinds = f"({', '.join(type(part).__name__ for part in found)})" if isinstance(found, tuple) else ""
            required = "(LearnerState, metrics), where metrics maps names to numbers"
            raise _fault("update", learner, f"{kinds or type(found).__name__}; expected {required}")
    for name in sorted({*before.params, *after.params}):
        found, required = (one.params.get(name) for one in (after, before))
        forms = ["absent" if x is None else f"{x.dtype}{list(x.shape)}" for x in (found, required)]
        if forms[0] != forms[1]:
            raise StageFault(
                f"the update returned params[{name!r}] as {forms[0]}; expected {forms[1]}, as it was before"
            )
    counters = {name: int(before.extra[name]) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}
    for episodes in rounds:
        counters[ENV_STEPS] += episodes.num_steps
        counters[ENV_STEPS_NOMINAL] += int(episodes.real.sum()) * episodes.rewards.shape[2]
    numbers = {name: float(count) for name, count in counters.items()}
    if taken := sorted((metrics | numbers).keys() & of_update.keys()):
        raise StageFault(
            f"the update returned the metrics {', '.join(taken)}, which every run already has; return them under "
            "other names"
        )
    extra = after.extra | {name: np.array(count, np.int64) for name, count in counters.items()}
    return Update(LearnerState(after.params, after.optimizer, extra), {**metrics, **of_update, **numbers})


def _fault(method: str, learner: AnyLearner, result: str) -> StageFault:
    return StageFault(f"{path_of(type(learner.unwrapped))}.{method}() returned {result}")


def _number(name: object, value: Any) -> float:
    """Return a metric's value as a float, or raise StageFault if the name or value has the wrong type."""
    if not isinstance(name, str):
        raise StageFault(f"the update returned a metric named {name!r}; expected a string, as in {{'loss': ...}}")
    if isinstance(value, int | float | np.number | np.bool) or getattr(value, "shape", None) == ():
        with suppress(ValueError, TypeError):  # an array that holds text or an object
            return float(value)
    raise StageFault(f"the update returned the metric {name!r} as {value!r}; expected one number, as in float(loss)")
