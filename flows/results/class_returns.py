"""Per-class returns and success rates, computed from tables, evaluations and the environment's task classes.

They are not stored, so no digest depends on the classes. Thinning keeps the episode tables that contain the data.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from metaloom.flows.formatting import finite, number, plural
from metaloom.pipeline.estimation.statistics import (
    BALANCED,
    COUNTED_EPISODES,
    UNTIL_SUCCESS,
    ClassEstimate,
    ClassReturns,
    official_rates,
)
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import IncompatibleFormat, Run
from metaloom.storage.read.info import mapping

if TYPE_CHECKING:
    import pyarrow as pa

    from metaloom.pipeline.envs.task_classes import Classes

SUCCESS, OFFICIAL = "success", "official_success_rate"
ByStep = Sequence[ClassReturns]  # per-class returns at each inner step of an iteration
_RARE = 0.01  # returns are class-balanced only if fewer than this fraction of iterations should lack a class


def headline_returns(drawn: Sequence[float], by_step: ByStep) -> tuple[Sequence[float], str]:
    """Return an iteration's mean return at each inner step, class-balanced if possible, and the name of the statistic.

    `drawn` contains the mean return over all tasks, per inner step.
    """
    if by_step and min(by_step[0].num_tasks) and count_alike([by_step]):
        return [returns.balanced.mean for returns in by_step], "class-balanced mean"
    return drawn, "mean over tasks"


def count_alike(iterations: Sequence[ByStep]) -> bool:
    """Return True if a run's returns should be averaged over classes, with equal weights.

    This holds if every iteration has equally many tasks of each class, or enough tasks that iterations rarely lack a
    class. The choice does not depend on a single iteration's draw.
    """
    if not iterations:
        return False
    counts = [steps[0].num_tasks for steps in iterations]
    classes = len(counts[0])
    return all(len({*of}) == 1 for of in counts) or classes * (1 - 1 / classes) ** sum(counts[0]) < _RARE


def classes_of(run: Run) -> "Classes | None":
    """Return the task classes from the newest session that recorded any; None if no session did."""
    for session in reversed(run.sessions()):
        if facts := mapping(session.environment.get("task_classes")):
            # Imported here: it imports pydantic, and most runs do not need it.
            from metaloom.pipeline.envs.task_classes import Classes

            try:
                return Classes.from_facts(facts)
            except ValueError as problem:
                raise IncompatibleFormat(
                    run.path,
                    found=f"environment of session {session.number}: {problem}",
                    required="task classes in the format of this version",
                    action="Read the run with the version that wrote it; `run.episodes()` needs no classes",
                ) from None
    return None


def returns_by_class(run: Run, iterations: Sequence[int], classes: "Classes | None") -> dict[int, ByStep]:
    """Return the per-class returns of the given complete iterations, keyed by iteration; empty without classes."""
    if classes is None or not iterations:
        return {}
    episodes = run.episodes(iterations)
    return episode_classes(episodes, classes, mean_returns(episodes))[0]


def episode_classes(
    episodes: "pa.Table", classes: "Classes", means: tuple[Array, Array, Array, Array]
) -> "tuple[dict[int, ByStep], Array | None]":
    """Return per-class returns, keyed by iteration, and each task's class, [I, B].

    `means` is the result of `mean_returns` for the episodes. Returns {} and None if they have no task parameters.
    """
    fields = [f"task_{field}" for field in classes.fields]
    if not {*fields} <= {*episodes.column_names}:  # a custom graph may draw no tasks
        return {}, None
    from metaloom.storage.format.columns import to_numpy  # imports pyarrow, which listing runs does not need

    place, step, returns, rows = means
    of = classes.of(np.stack([to_numpy(episodes[field])[rows] for field in fields], axis=1), classes.fields)
    # Rows are sorted, so that an inner step of an iteration is a contiguous range.
    starts = np.flatnonzero(np.diff(place, prepend=-1) | np.diff(step, prepend=-1))
    found: dict[int, list[ClassReturns]] = {}
    for start, stop in zip(starts, [*starts[1:], len(place)], strict=True):
        tasks = slice(start, stop)
        found.setdefault(int(place[start]), []).append(classes.returns(returns[tasks], of[tasks]))
    return dict(found), of[step == step[0]].reshape(len(found), -1)


def mean_returns(episodes: "pa.Table") -> tuple[Array, Array, Array, Array]:
    """Return the mean return for each iteration, inner step and task in a table of episodes, sorted by these three.

    The result is iteration, inner step, mean return, and row of the first episode, [n] each.
    """
    from metaloom.storage.format.columns import to_numpy

    # Arrow's `group_by` would import pandas, which adds half a second to every `metaloom ls`.
    keys = np.stack([to_numpy(episodes[name]) for name in ("iteration", "step", "task")])
    order = np.lexsort(keys[::-1])
    first = np.flatnonzero(np.diff(keys[:, order], prepend=-1).any(axis=0))
    returns = np.add.reduceat(to_numpy(episodes["return"])[order], first) / np.diff(first, append=len(order))
    rows = order[first]
    return keys[0, rows], keys[1, rows], returns, rows


def class_table(run: Run, iterations: Sequence[int], classes: "Classes") -> "pa.Table":
    """Return the `class_rows` of several iterations as one table."""
    import pyarrow as pa

    found = returns_by_class(run, iterations, classes).items()
    rows = [{"iteration": iteration, **row} for iteration, by_step in found for row in class_rows(by_step)]
    kinds = [("iteration", pa.int32()), ("step", pa.int32()), ("class", pa.string()), ("num_tasks", pa.int32())]
    numbers = [("average_return", pa.float64()), ("standard_error", pa.float64())]
    return pa.Table.from_pylist(rows, schema=pa.schema([*kinds, *numbers]))


def class_rows(by_step: ByStep) -> list[dict[str, Any]]:
    """Return one JSON row per inner step and class, and a class-balanced row per inner step."""
    return [
        {
            "step": k,
            "class": name,
            "num_tasks": count,
            "average_return": finite(estimate.mean),
            "standard_error": finite(estimate.standard_error),
        }
        for k, returns in enumerate(by_step)
        for name, count, estimate in named_estimates(returns)
    ]


def named_estimates(returns: ClassReturns) -> list[tuple[str, int, ClassEstimate]]:
    """Return the name, number of tasks and estimate of each class, followed by those of the class-balanced mean."""
    each = zip(returns.names, returns.num_tasks, returns.estimates, strict=True)
    return [*each, (BALANCED, sum(returns.num_tasks), returns.balanced)]


def classes_text(by_step: ByStep) -> str:
    """Format returns after adaptation, such as "forward 7.3, backward 83.1, balanced 45.2 ± 1.2".

    Classes without tasks are only counted, as in "push 1.5, sweep 2.7, no task of 8 others".
    """
    if not by_step:
        return ""
    *each, (balanced, _, estimate) = named_estimates(by_step[-1])
    parts = [f"{name} {number(value.mean)}" for name, count, value in each if count]
    missing = len(each) - len(parts)
    last = f"no task of {plural(missing, 'other')}" if missing else f"{balanced} {plus_minus(estimate)}"
    return ", ".join([*parts, last])


def plus_minus(estimate: ClassEstimate) -> str:
    """Format a mean with its standard error, if it has one, such as "45.2 ± 1.2"."""
    mean, error = estimate
    return number(mean) if math.isnan(error) else f"{number(mean)} ± {number(error)}"


def official_success(evaluation: Evaluation, k: int, classes: "Classes | None") -> dict[str, float]:
    """Return Meta-World's success rate after k steps, averaged over classes, keyed by OFFICIAL; {} if undefined."""
    of = np.zeros(len(evaluation.task_ids))  # one class if tasks have no such field
    if "class" in evaluation.names:
        of = evaluation.task_params[:, evaluation.names.index("class")]
    rates = _official(evaluation, k, of, np.unique(of).tolist(), classes)
    return {OFFICIAL: float(np.mean(rates))} if rates else {}


def success_rows(evaluation: Evaluation, classes: "Classes | None") -> list[dict[str, Any]]:
    """Return a JSON row per number of adaptation steps and class, and a class-balanced row per number.

    `success_rate` is the fraction of successful test episodes. Empty without success facts or classes.
    """
    if classes is None or SUCCESS not in evaluation.test_facts:
        return []
    of = classes.of(evaluation.task_params, evaluation.names)
    among = [int(c) for c in classes.among(of) if (of == c).any()]
    rows: list[dict[str, Any]] = []
    for k in range(evaluation.adaptation_steps + 1):
        success = evaluation.test_facts[SUCCESS][:, k]
        rates = {"success_rate": [float(success[of == c].mean()) for c in among]}
        if official := _official(evaluation, k, of, among, classes):
            rates[OFFICIAL] = official
        names, counts = [classes.names[c] for c in among], [int((of == c).sum()) for c in among]
        for i, (name, count) in enumerate(zip([*names, BALANCED], [*counts, len(of)], strict=True)):
            about = {"adaptation_steps": k, "class": name, "num_tasks": count}
            rows.append(about | {key: [*values, float(np.mean(values))][i] for key, values in rates.items()})
    return rows


def _official(
    evaluation: Evaluation, k: int, of: Array, among: Sequence[int], classes: "Classes | None"
) -> list[float]:
    """Return Meta-World's success rate per class.

    Empty if the environment does not report the length until success, if there are too few tasks or test episodes for
    the package's evaluator, or if there are several classes and none is held out: the package evaluates multi-task
    benchmarks differently, in one environment per class.
    """
    if not {SUCCESS, UNTIL_SUCCESS} <= evaluation.test_facts.keys():
        return []
    multi_task = not classes.held_out if classes else len(among) > 1
    if multi_task or evaluation.test_returns.shape[2] < COUNTED_EPISODES:
        return []
    lengths, success = (evaluation.test_facts[name][:, k] for name in (UNTIL_SUCCESS, SUCCESS))
    rates = official_rates(lengths, success, of, among)
    return [] if np.isnan(rates).any() else rates
