"""Prefect flows generated from operations, available as lazy attributes `flow_NAME` of this module.

This module must not import annotations from __future__, because Prefect builds a form from the annotation objects.
"""

import logging
import re
from collections.abc import Callable
from inspect import Parameter as P
from inspect import Signature, getdoc
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import distributed
from cyclopts import Parameter
from prefect import Flow, flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from metaloom.flows.arguments import limits_of
from metaloom.flows.operations import Operation, operations
from metaloom.flows.operations.options import (
    InProcess,
    Iteration,
    is_backend,
    is_python_only,
    marks_of,
    parameters_of,
    text_type,
)
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.streams import quiet

_WORKERS = (
    "    workers: Number of Dask worker processes for rollouts on this machine; 0 samples in the flow's own process. "
    "The default is 0 for a replay, an evaluation or a run with one task, otherwise 2."
)


# Dask logs connections; Prefect logs successful stages, which the page shows.
QUIET = (logging.WARNING, "prefect.task_runs", distributed.__name__)


def __getattr__(name: str) -> Flow[..., Any]:
    operation = operations().get(name.removeprefix("flow_"))
    if operation is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_flow(operation)


def make_flow(operation: Operation, ended: Callable[[Any, Any], State] | None = None, **types: Any) -> Flow[..., Any]:
    """Return a Prefect flow that runs an operation.

    `ended` receives the run and the result, publishes the result and returns the flow run's state. `types` are more
    specific parameter types for the form, keyed by parameter name.
    """
    declared = parameters_of(operation.function)
    parameters = [
        form_parameter(p, types.get(p.name, p.annotation))
        for p in declared
        if p.annotation is Iteration or not is_python_only(p.annotation)
    ]
    # The parameters are positional, so required ones must come first.
    form = Signature(sorted(parameters, key=lambda p: p.default is not P.empty))

    def work(*args: Any, **options: Any) -> State:
        given = form.bind(*args, **options).arguments
        if "workers" in given:
            given["backend"] = Backend(workers=given.pop("workers"))
        with quiet(*QUIET):
            result = operation.function(**given)
        if ended is not None:
            return ended(given.get("run"), result)
        return (Completed if operation.succeeded(result) else Failed)(message=str(result))

    work.__name__ = work.__qualname__ = operation.name
    work.__doc__ = getdoc(operation.function) or ""
    helps = {p.name: mark.help for p in declared for mark in marks_of(p.annotation) if mark.help}
    described = {"backend": _WORKERS, **{name: f"    {name}: {text}" for name, text in helps.items()}}
    for name, line in described.items():
        work.__doc__ = re.sub(rf"(?m)^    {name}: .*$", line, work.__doc__)
    work.__signature__ = form  # pyright: ignore[reportFunctionMemberAccess]
    title = f"{operation.name} {{run}}" if "run" in form.parameters else operation.name
    return flow(name=operation.name, flow_run_name=title)(work)


def form_parameter(parameter: P, annotation: Any) -> P:
    """Convert a parameter of an operation to a parameter of the form."""
    kind = P.POSITIONAL_OR_KEYWORD
    if is_backend(parameter.annotation):
        workers = Annotated[int | None, Field(ge=0)]
        return P("workers", kind, default=0 if parameter.annotation is InProcess else None, annotation=workers)
    return P(parameter.name, kind, default=parameter.default, annotation=form_type(text_type(annotation)))


def form_type(annotation: Any) -> Any:
    """Convert an annotation so that Prefect's form shows its limits."""
    if get_origin(annotation) in (Union, UnionType):
        return Union[*map(form_type, get_args(annotation))]
    if get_origin(annotation) is not Annotated:
        return annotation
    plain, *marks = get_args(annotation)
    limits = [Field(ge=limit.gte, le=limit.lte) for mark in marks for limit in limits_of(mark)]
    kept = [*(mark for mark in marks if not isinstance(mark, Parameter)), *limits]
    return Annotated[form_type(plain), *kept] if kept else form_type(plain)
