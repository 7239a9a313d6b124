"""Checks of function arguments against their annotations.

Importing pydantic, whose `validate_call` does the same, takes a tenth of a command's start-up time, and `validate_call`
would import heavy modules for the types in annotations.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter as P
from inspect import signature
from numbers import Integral, Real
from reprlib import Repr
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, cast, get_args, get_origin

from cyclopts import Parameter
from cyclopts.validators import Number

from metaloom.flows.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_NAMES = {None: "None", NoneType: "None", bool: "True or False", int: "an integer", float: "a number", str: "text"}
_found = Repr()
_found.maxstring = _found.maxother = 60


def checked(function: F) -> F:
    """Wrap a function so that it raises UsageError for arguments that do not match its annotations."""
    described = signature(function)

    @cache
    def annotations() -> Mapping[str, Any]:
        written = any(isinstance(p.annotation, str) for p in described.parameters.values())  # by a __future__ import
        found = signature(function, eval_str=True) if written else described
        return {p.name: p.annotation for p in found.parameters.values() if p.kind is not P.VAR_KEYWORD}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = described.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself reports missing or unknown arguments
            return function(*args, **kwargs)
        for name, annotation in annotations().items():
            if name in arguments and not fits(value := arguments[name], annotation):
                found, listed = f"{name}={_found.repr(value)}", isinstance(value, str) and fits([value], annotation)
                cure = f"; write {name}=[{value!r}]" if listed else ""
                raise UsageError(f"{function.__name__}: got {found}; expected {required(annotation)}{cure}")
        return function(*args, **kwargs)

    return cast(F, call)


def fits(value: object, annotation: Any) -> bool:
    """Return True if a value matches an annotation. A string is not a list, and True is not a number."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return fits(value, args[0]) and all(_within(value, limit) for mark in args[1:] for limit in limits_of(mark))
    if origin in (Union, UnionType):
        return any(fits(value, kind) for kind in args)
    if origin is Literal:
        return any(fits(value, type(choice)) and value == choice for choice in args)
    if origin is Sequence:  # also accepts an array, although that is not a subclass
        indexed = hasattr(value, "__getitem__") and hasattr(value, "__len__")
        listed = indexed and not isinstance(value, str | bytes | Mapping)
        return listed and all(fits(item, args[0]) for item in cast(Sequence[Any], value))
    if origin is tuple and ... not in args:
        return isinstance(value, tuple | list) and len(value) == len(args) and all(map(fits, value, args))
    if origin is Mapping:
        items = cast(Mapping[Any, Any], value).items() if isinstance(value, Mapping) else None
        return items is not None and all(fits(key, args[0]) and fits(item, args[1]) for key, item in items)
    if origin is Callable:
        return callable(value)
    if isinstance(annotation, ForwardRef):  # if there is such a value, its module has been imported
        return any(kind.__name__ == annotation.__forward_arg__ for kind in type(value).__mro__)
    if annotation in (int, float):
        return type(value) is not bool and isinstance(value, Integral if annotation is int else Real)
    if annotation is None or annotation is Any:
        return annotation is Any or value is None
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def required(annotation: Any) -> str:
    """Return a description of the values that match an annotation."""
    *others, last = dict.fromkeys(_kinds(annotation))
    return f"{', '.join(others)} or {last}" if others else last


def _kinds(annotation: Any) -> list[str]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = "".join(
            f" >= {limit.gte}" if limit.lte is None else f" from {limit.gte} to {limit.lte}"
            for mark in args[1:]
            for limit in limits_of(mark)
        )
        return [f"{kind}{limits}" for kind in _kinds(args[0])]
    if origin in (Union, UnionType):
        return [kind for each in args for kind in _kinds(each)]
    return [_kind(annotation)]


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is Sequence:
        return f"a list whose items are each {required(args[0])}"
    if origin is tuple:
        return f"a tuple of {len(args)}: {', '.join(map(required, args))}"
    if origin is Mapping:
        return "a mapping"
    if origin is Callable:
        return "a function"
    name = getattr(annotation, "__forward_arg__", getattr(annotation, "__name__", str(annotation)))
    return _NAMES.get(annotation, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def limits_of(mark: object) -> list[Number]:
    """Return the numeric limits in one item of the metadata of an Annotated type."""
    validators = mark.validator if isinstance(mark, Parameter) else ()
    listed = validators if isinstance(validators, tuple) else (validators,)
    return [validator for validator in listed if isinstance(validator, Number)]


def _within(value: object, limit: Number) -> bool:
    try:
        limit(int, value)
    except ValueError:
        return False
    return True
