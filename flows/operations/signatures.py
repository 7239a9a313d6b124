"""Signatures of operations for commands and forms."""

from collections.abc import Callable, Sequence
from inspect import Parameter as P
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from cyclopts import Parameter

from metaloom import storage
from metaloom.flows.operations.options import InProcess
from metaloom.flows.rollouts.backend import Backend


def parameters_of(function: Callable[..., Any]) -> list[P]:
    """Return the parameters of an operation, without `**settings`, which `overrides` replaces in text."""
    found = signature(function)
    if any(isinstance(p.annotation, str) for p in found.parameters.values()):  # from __future__ import annotations
        found = signature(function, eval_str=True)
    return [p for p in found.parameters.values() if p.kind is not P.VAR_KEYWORD]


def is_python_only(annotation: Any) -> bool:
    """Return True for a parameter that a command line does not support."""
    return any(mark.parse is False for mark in marks_of(annotation))


def is_backend(annotation: Any) -> bool:
    """Return True for a choice of backend, which has separate options."""
    return annotation in (Backend, InProcess)


def marks_of(annotation: Any) -> list[Parameter]:
    """Return the command-line marks of an annotation."""
    return [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Parameter)]


def text_type(annotation: Any) -> Any:
    """Return the type of a parameter given as text: names for runs, paths, and sequences of such types."""
    if get_origin(annotation) is Annotated:
        plain, *marks = get_args(annotation)
        return Annotated[text_type(plain), *marks]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [*get_args(annotation)]
        if storage.Run in kinds:
            kinds = [kind for kind in kinds if kind not in (Path, storage.Run)]
        elif {str, Path} <= {*kinds}:  # the first: `str | Path` for names of runs, `Path | str` for files
            second = max(str, Path, key=kinds.index)
            kinds = [kind for kind in kinds if kind is not second]
        kinds = [text_type(kind) for kind in kinds if not is_python_only(kind)]
        repeated = [kind for kind in kinds if get_origin(kind) is tuple]
        return repeated[0] if repeated else Union[*kinds]
    if get_origin(annotation) is Sequence:
        return tuple[text_type(get_args(annotation)[0]), ...]
    return annotation
