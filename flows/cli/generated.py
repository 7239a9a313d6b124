"""Commands generated from operations, as attributes `command_NAME` that are created on first use."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import BoundArguments, Signature, cleandoc, signature
from inspect import Parameter as P
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

from cyclopts import App, Parameter

from metaloom.flows.cli.output import answer
from metaloom.flows.errors import FAILURE, UsageError
from metaloom.flows.operations import INSTALLED, Operation, operations, resolve
from metaloom.flows.operations.options import InProcess, is_backend, is_python_only, marks_of, parameters_of, text_type
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.views.parts import as_text

_BACKEND = [
    P(
        field.name,
        P.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[
            field.type,
            Parameter(name=f"--{field.name.removesuffix('_seconds').replace('_', '-')}"),
        ],
    )
    for field in fields(Backend)
]
"""Options of the rollout backend."""
_BACKEND_HELP = cleandoc(Backend.__doc__ or "").partition("Attributes:\n")[2]
_LAST = ("trust", *(p.name for p in _BACKEND), "log", "film_every", "metrics_port", "as_json")
"""Common options, which help lists last, in this order."""
_AS_JSON = Annotated[
    bool, Parameter(name="--json", negative=(), show_default=False, help="Print JSON instead of text.")
]
_REPEATABLE = Parameter(negative=(), show_default=False)

R = TypeVar("R")


@dataclass(frozen=True)
class Call(Generic[R]):
    """An operation and the arguments given to it on the command line, keyed by name."""

    operation: Operation
    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given[name] if name in self.given else signature(self.operation.function).parameters[name].default

    def __call__(self, **others: Any) -> R:
        """Run the operation; `others` are Python-only arguments."""
        work = self.operation.function
        bound = BoundArguments(signature(work), OrderedDict({**self.given, **others}))
        return work(*bound.args, **bound.kwargs)

    def show(self, result: R, as_json: bool) -> int:
        """Print a result of the operation as JSON or formatted text, and return the exit code."""
        view = resolve(self.operation.view) if self.operation.view and not as_json else as_text
        answer(as_json, lambda: data_of(result), lambda: view(result))
        return 0 if self.operation.succeeded(result) else FAILURE


def __getattr__(name: str) -> Callable[..., int]:
    operation = operations().get(name.removeprefix("command_"))
    if operation is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if operation.group != INSTALLED:
        return make_command(operation)
    try:
        command = make_command(operation)
        App(default_command=command).assemble_argument_collection()
    except (Exception, SystemExit) as problem:
        return _refused(operation.broken(problem))
    return command


def _refused(reason: str) -> Callable[..., int]:
    def command(*_: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
        raise UsageError(reason)

    command.__doc__ = reason
    return command


def make_command(operation: Operation) -> Callable[..., int]:
    """Return a command for an operation, with the parameters that the command line supports."""
    work = operation.function
    shown = resolve(operation.terminal) if operation.terminal else show
    declared = parameters_of(work)
    backends = [p.annotation for p in declared if is_backend(p.annotation)]
    said = [p for p in declared if not is_python_only(p.annotation) and not is_backend(p.annotation)]
    parameters = [*map(command_parameter, said), *(_BACKEND if backends else ())]
    extras = [p for p in signature(shown).parameters.values() if p.name not in ("call", "as_json")]
    parameters += map(command_parameter, extras)
    if operation.has_json:
        parameters.append(P("as_json", P.KEYWORD_ONLY, default=False, annotation=_AS_JSON))
    parameters.sort(key=lambda p: (p.kind, _LAST.index(p.name) if p.name in _LAST else -1))
    described = Signature(parameters)

    def command(*args: Any, **kwargs: Any) -> int:
        given = described.bind(*args, **kwargs).arguments
        if backends:
            where = {p.name: given.pop(p.name) for p in _BACKEND if p.name in given}
            if backends[0] is InProcess and "scheduler" not in where:
                where.setdefault("workers", 0)
            given["backend"] = Backend(**where)
        apart = {p.name: given.pop(p.name) for p in extras if p.name in given}
        as_json = {"as_json": given.pop("as_json", False)} if operation.has_json else {}
        unsaid = [p.name for p in declared if p.default is P.empty and p.name not in given]
        return shown(Call(operation, given | dict.fromkeys(unsaid)), **apart, **as_json)

    command.__doc__ = re.sub(r"(?m)^    backend: .*$", lambda _: _BACKEND_HELP, cleandoc(work.__doc__ or ""))
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = described  # pyright: ignore[reportFunctionMemberAccess]
    return command


def command_parameter(parameter: P) -> P:
    """Return a command's parameter for an operation's parameter."""
    kind, annotation = parameter.kind, text_type(parameter.annotation)
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) is tuple:
        annotation = Annotated[annotation, _REPEATABLE]
        kind = P.POSITIONAL_ONLY if kind is P.POSITIONAL_OR_KEYWORD else kind
    elif parameter.default is False:
        annotation = Annotated[annotation, _REPEATABLE]
    if any(mark.name for mark in marks_of(parameter.annotation)):
        kind = P.KEYWORD_ONLY
    return parameter.replace(kind=kind, annotation=annotation)


def show(call: Call[Any], *, as_json: bool = False) -> int:
    """Run an operation and print its result, if any."""
    result = call()
    return 0 if result is None else call.show(result, as_json)


def data_of(result: Any) -> Any:
    """Return a result as JSON data."""
    for form in ("as_dict", "as_list"):
        if hasattr(result, form):
            return getattr(result, form)()
    if is_dataclass(result) and not isinstance(result, type):
        return asdict(result)
    if isinstance(result, Mapping):
        return {str(key): data_of(value) for key, value in result.items()}
    return [*map(data_of, result)] if isinstance(result, list | tuple) else result
