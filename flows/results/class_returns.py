"""Returns by class of task of a stored run: from its tables, and the classes that its environment declared.

They are derived, not stored: the tables of episodes have the return and the task of every episode, and stay
when an iteration is thinned, so no digest depends on what counts as a class.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from metaloom.flows.formatting import finite, number, plural
from metaloom.pipeline.estimation.statistics import BALANCED, ClassEstimate, ClassReturns
from metaloom.pipeline.types import Array
from metaloom.storage import IncompatibleFormat, Run
from metaloom.storage.read.info import mapping

if TYPE_CHECKING:
    import pyarrow as pa

    from metaloom.pipeline.envs.task_classes import Classes

ByStep = Sequence[ClassReturns]
"""Of an iteration: one for every inner step, the first before adaptation."""
_RARE = 0.01
"""Share of iterations that may lack a class, if classes count alike in the returns of a run."""


class Headline(NamedTuple):
    """Returns of an iteration as every list, tile and curve shows them.

    Attributes:
        returns: Mean return of every inner step, the first before adaptation.
        statistic: Name of the mean.
    """

    returns: Sequence[float]
    statistic: str


def headline_returns(drawn: Sequence[float], by_step: ByStep) -> Headline:
    """Choose the mean that stands for an iteration, as `count_alike` says.

    Args:
        drawn: Mean over the tasks as drawn, of every inner step.
        by_step: Returns by class of task; empty where the environment has none.
    """
    if by_step and min(by_step[0].num_tasks) and count_alike([by_step]):
        return Headline([returns.balanced.mean for returns in by_step], "class-balanced mean")
    return Headline(drawn, "mean over tasks")


def count_alike(iterations: Sequence[ByStep]) -> bool:
    """Return True if all classes have equal weight in the returns of a run.

    They do if every iteration has equally many tasks of each class, or if tasks are so numerous that, drawn alike, few
    iterations lack a class: so the choice does not depend on the draw of one iteration.
    """
    if not iterations:
        return False
    counts = [steps[0].num_tasks for steps in iterations]
    classes = len(counts[0])
    return all(len({*of}) == 1 for of in counts) or classes * (1 - 1 / classes) ** sum(counts[0]) < _RARE


def classes_of(run: Run) -> "Classes | None":
    """Return the task classes that a run's environment declared in the newest session; None if it had none."""
    for session in reversed(run.sessions()):
        if facts := mapping(session.environment.get("task_classes")):
            # Here, because most runs are shown without it, and it brings pydantic.
            from metaloom.pipeline.envs.task_classes import Classes

            try:
                return Classes.from_facts(facts)
            except ValueError as problem:
                raise IncompatibleFormat(
                    run.path,
                    found=f"environment of session {session.number}: {problem}",
                    required="classes of tasks as this version records them",
                    action="Read the run with the version that wrote it; `run.episodes()` needs no classes",
                ) from None
    return None


def returns_by_class(run: Run, iterations: Sequence[int], classes: "Classes | None") -> dict[int, ByStep]:
    """Return the returns of complete iterations by class of task; nothing where the environment has none."""
    if classes is None or not iterations:
        return {}
    return episode_classes(run.episodes(iterations), classes)[0]


def episode_classes(episodes: "pa.Table", classes: "Classes") -> "tuple[dict[int, ByStep], Array | None]":
    """Return a table of episodes' returns by class of task, and the class of every task, [I, B].

    An empty dict and None if episodes have no task.
    """
    fields = [f"task_{field}" for field in classes.fields]
    if not {*fields} <= {*episodes.column_names}:  # a custom graph may draw no tasks
        return {}, None
    from metaloom.storage.format.columns import to_numpy  # which imports pyarrow, and the list of runs does without

    # Not `group_by`: Arrow's imports pandas, half a second of every `metaloom ls`.
    columns = {name: to_numpy(episodes[name]) for name in ("iteration", "step", "task", "return", *fields)}
    order = np.lexsort((columns["task"], columns["step"], columns["iteration"]))
    keys = np.stack([columns[name][order] for name in ("iteration", "step", "task")])
    first = np.flatnonzero(np.diff(keys, prepend=-1).any(axis=0))
    returns = np.add.reduceat(columns["return"][order], first) / np.diff(first, append=len(order))
    params = np.stack([columns[field][order][first] for field in fields], axis=1)
    place, step, _ = keys[:, first]
    of = classes.of(params, classes.fields)
    # Rows are sorted, so that an inner step of an iteration is a contiguous range.
    starts = np.flatnonzero(np.diff(place, prepend=-1) | np.diff(step, prepend=-1))
    found: dict[int, list[ClassReturns]] = {}
    for start, stop in zip(starts, [*starts[1:], len(place)], strict=True):
        tasks = slice(start, stop)
        found.setdefault(int(place[start]), []).append(classes.returns(returns[tasks], of[tasks]))
    return dict(found), of[step == step[0]].reshape(len(found), -1)


def class_table(run: Run, iterations: Sequence[int], classes: "Classes") -> "pa.Table":
    """Return `class_rows` of some iterations as one table."""
    import pyarrow as pa

    rows = [
        {"iteration": iteration, **row}
        for iteration, by_step in returns_by_class(run, iterations, classes).items()
        for row in class_rows(by_step)
    ]
    kinds = [("iteration", pa.int32()), ("step", pa.int32()), ("class", pa.string()), ("num_tasks", pa.int32())]
    numbers = [("average_return", pa.float64()), ("standard_error", pa.float64())]
    return pa.Table.from_pylist(rows, schema=pa.schema([*kinds, *numbers]))


def class_rows(by_step: ByStep) -> list[dict[str, Any]]:
    """Return JSON rows, one per inner step and class, and one in which all classes have equal weight."""
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
    """Name, number of tasks and estimate of every class; last the mean over classes."""
    each = zip(returns.names, returns.num_tasks, returns.estimates, strict=True)
    return [*each, (BALANCED, sum(returns.num_tasks), returns.balanced)]


def classes_text(by_step: ByStep) -> str:
    """Format returns after adaptation: "forward 7.3, backward 83.1, balanced 45.2 ± 1.2".

    Only classes that tasks were drawn of are named: "push 1.5, sweep 2.7, no task of 8 others".
    """
    if not by_step:
        return ""
    *each, (balanced, _, estimate) = named_estimates(by_step[-1])
    parts = [f"{name} {number(value.mean)}" for name, count, value in each if count]
    missing = len(each) - len(parts)
    last = f"no task of {plural(missing, 'other')}" if missing else f"{balanced} {plus_minus(estimate)}"
    return ", ".join([*parts, last])


def plus_minus(estimate: ClassEstimate) -> str:
    """Format a mean with its standard error, if there is one: "45.2 ± 1.2"."""
    mean, error = estimate
    return number(mean) if math.isnan(error) else f"{number(mean)} ± {number(error)}"
