"""Stages that compute each task separately: inputs are split by task and outputs joined."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
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
    sizes = {size for value in inputs.values() for size in _sizes(value)}
    if len(sizes) != 1:
        raise GraphError(
            f"stage {stage.name} is over tasks, but its inputs are of {sorted(sizes) or 'no'} tasks; required "
            "inputs of one number of tasks"
        )

    def one(b: int) -> Any:
        at = replace(tools["at"], task=b)
        given = [at if name == "at" else tool for name, tool in zip(stage.tools, positional, strict=True)]
        return stage.run(*given, **{name: _cut(value, b) for name, value in inputs.items()})

    return _joined(stage, [*parallel(one, range(*sizes))])


def _sizes(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, tuple) else (value,):
        for name in fields_of_tasks(type(one)):
            part = getattr(one, name)
            arrays = [*part.values()] if isinstance(part, Mapping) else [part]
            yield from (len(array) for array in arrays if array is not None)


def _cut(value: Any, b: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(one, b) for one in value)
    found = dict[str, Any]()
    for name in fields_of_tasks(type(value)):
        part = getattr(value, name)
        if isinstance(part, Mapping):
            found[name] = {key: array[b : b + 1] for key, array in part.items()}
        else:
            found[name] = None if part is None else part[b : b + 1]
    return replace(value, **found) if found else value


def _joined(stage: Stage, values: Sequence[Any]) -> Any:
    for b, value in enumerate(values):
        _require_one_task(stage, b, value, values[0])
    first, parts = values[0], dict[str, Any]()
    for name in (f.name for f in fields(stage.output)):
        given: list[Any] = [getattr(value, name) for value in values]
        if isinstance(given[0], Mapping):
            arrays: Mapping[str, Array] = given[0]
            parts[name] = {key: np.concatenate([part[key] for part in given]) for key in arrays}
        else:
            parts[name] = None if given[0] is None else np.concatenate(given)
    return replace(first, **parts)


def _require_one_task(stage: Stage, b: int, value: Any, first: Any) -> None:
    where = f"stage {stage.name} is over tasks, and for task {b} returned"
    if not isinstance(value, stage.output):
        raise GraphError(f"{where} {type(value).__name__}; required {stage.output.__name__}, as it declares")
    if sizes := {size for size in _sizes(value) if size != 1}:
        raise GraphError(
            f"{where} arrays of {max(sizes)} tasks; required arrays of this task alone: a first axis of length 1"
        )
    if (found := _names(value)) != (known := _names(first)):
        raise GraphError(
            f"{where} other arrays than for task 0: only one has {', '.join(sorted(found ^ known))}; required the "
            "same arrays for every task"
        )


def _names(value: Any) -> set[str]:
    parts = {name: getattr(value, name) for name in fields_of_tasks(type(value))}
    named = {f"{name}[{key!r}]" for name, part in parts.items() if isinstance(part, Mapping) for key in part}
    return named | {name for name, part in parts.items() if part is not None and not isinstance(part, Mapping)}
