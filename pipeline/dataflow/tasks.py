"""Stages that compute each task separately: inputs are split by task and outputs joined."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from metaloom.pipeline.dataflow.stage import GraphError, Stage, fields_of_tasks
from metaloom.pipeline.types import Array, ParallelMap


def call(stage: Stage, tools: Mapping[str, Any], inputs: Mapping[str, Any], parallel: ParallelMap) -> Any:
    """Call a stage's function with its tools and inputs, task by task if it is over tasks.

    Raises:
        GraphError: the stage is over tasks, but its inputs have no tasks or different numbers of tasks, or its output
            for a task lacks a task axis of length 1 or has other arrays than for another task.
    """
    positional = [tools[name] for name in stage.tools]
    if stage.over is None:
        return stage.run(*positional, **inputs)
    sizes = set[int]().union(*map(_sizes, inputs.values()))
    if len(sizes) != 1:
        raise GraphError(
            f"stage {stage.name} is over tasks, but its inputs are of {sorted(sizes) or 'no'} tasks; required inputs "
            "with the same number of tasks"
        )

    def one(b: int) -> Any:
        at = replace(tools["at"], task=b)
        given = [at if name == "at" else tool for name, tool in zip(stage.tools, positional, strict=True)]
        return stage.run(*given, **{name: _cut(value, b) for name, value in inputs.items()})

    return _joined(stage, [*parallel(one, range(*sizes))])


def _arrays(value: Any) -> dict[tuple[str, str | None], Array]:
    """Return the arrays whose first axis is tasks, by field and, in a mapping, name."""
    found = dict[tuple[str, str | None], Array]()
    for name in fields_of_tasks(type(value)):
        part = getattr(value, name)
        if isinstance(part, Mapping):
            found |= {(name, key): array for key, array in part.items()}
        elif part is not None:
            found[name, None] = part
    return found


def _with(value: Any, arrays: Mapping[tuple[str, str | None], Array]) -> Any:
    parts = dict[str, Any]()
    for (name, key), array in arrays.items():
        if key is None:
            parts[name] = array
        else:
            parts.setdefault(name, {})[key] = array
    return replace(value, **parts) if parts else value


def _sizes(value: Any) -> set[int]:
    return {len(array) for one in (value if isinstance(value, tuple) else (value,)) for array in _arrays(one).values()}


def _cut(value: Any, b: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(one, b) for one in value)
    return _with(value, {path: array[b : b + 1] for path, array in _arrays(value).items()})


def _joined(stage: Stage, values: Sequence[Any]) -> Any:
    parts = list[dict[tuple[str, str | None], Array]]()
    for b, value in enumerate(values):
        where = f"stage {stage.name} is over tasks, and for task {b} returned"
        if not isinstance(value, stage.output):
            raise GraphError(f"{where} {type(value).__name__}; required {stage.output.__name__}, as it declares")
        parts.append(_arrays(value))
        if sizes := {len(array) for array in parts[b].values()} - {1}:
            raise GraphError(
                f"{where} arrays of {max(sizes)} tasks; required arrays of this task only: a first axis of length 1"
            )
        if other := parts[b].keys() ^ parts[0].keys():
            names = sorted(name if key is None else f"{name}[{key!r}]" for name, key in other)
            raise GraphError(
                f"{where} different arrays than for task 0: only one has {', '.join(names)}; required the same "
                "arrays for every task"
            )
    return _with(values[0], {path: np.concatenate([part[path] for part in parts]) for path in parts[0]})
