"""Parameters shared by several operations, described once for Python, the command line and Prefect's forms."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter as P
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from cyclopts import Parameter
from cyclopts.validators import Number

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.runs import RunLike, runs_root
from metaloom.storage import find_runs, url_of


def parameters_of(function: Callable[..., Any]) -> list[P]:
    """Return the parameters of an operation except `**settings`, for which text interfaces use `overrides`."""
    found = signature(function)
    if any(isinstance(p.annotation, str) for p in found.parameters.values()):  # from __future__ import annotations
        found = signature(function, eval_str=True)
    return [p for p in found.parameters.values() if p.kind is not P.VAR_KEYWORD]


def is_python_only(annotation: Any) -> bool:
    """Return True if an annotation marks a parameter that the command line does not support."""
    return any(mark.parse is False for mark in marks_of(annotation))


def is_backend(annotation: Any) -> bool:
    """Return True if an annotation is a rollout backend, whose fields are separate command-line options."""
    return annotation in (Backend, InProcess)


def marks_of(annotation: Any) -> list[Parameter]:
    """Return the cyclopts `Parameter` marks of an annotation."""
    return [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Parameter)]


def text_type(annotation: Any) -> Any:
    """Return a parameter's type for text interfaces: run names instead of runs, and tuples instead of sequences."""
    if get_origin(annotation) is Annotated:
        plain, *marks = get_args(annotation)
        return Annotated[text_type(plain), *marks]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [*get_args(annotation)]
        if storage.Run in kinds:
            kinds = [kind for kind in kinds if kind not in (Path, storage.Run)]
        elif {str, Path} <= {*kinds}:  # keep the first: `str | Path` for names of runs, `Path | str` for files
            second = max(str, Path, key=kinds.index)
            kinds = [kind for kind in kinds if kind is not second]
        kinds = [text_type(kind) for kind in kinds if not is_python_only(kind)]
        repeated = [kind for kind in kinds if get_origin(kind) is tuple]
        return repeated[0] if repeated else Union[*kinds]
    if get_origin(annotation) is Sequence:
        return tuple[text_type(get_args(annotation)[0]), ...]
    return annotation


Natural = Annotated[int, Parameter(validator=Number(gte=0))]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]


def complete_runs(context: object) -> list[str]:
    """Return the names of the runs in the runs folder for shell completion; none if it is a URL."""
    root = runs_root()
    if url_of(root) is not None:  # listing them requires requests
        return []
    return sorted(folder.name for folder in find_runs(root))


def complete_recipes(context: object) -> list[str]:
    """Return the names of all recipes for shell completion."""
    return [*late.RECIPES]


RUN_HELP = "A name under the runs folder, a path, or a URL such as s3://bucket/runs/first."
_AT = "; @-1 or @latest is the newest, @best has the highest return"


def _runs(text: str) -> Parameter:
    return Parameter(help=text, completer=complete_runs)


RunArgument = Annotated[RunLike, _runs(RUN_HELP)]
RunAtArgument = Annotated[RunLike, _runs(f"RUN, or RUN@ITERATION for one iteration{_AT}. {RUN_HELP}")]
LearnerArgument = Annotated[
    RunLike, _runs(f"RUN for its newest learner, RUN@N for the learner after N updates{_AT}. {RUN_HELP}")
]
ParentArgument = Annotated[
    RunLike, _runs(f"RUN@N to begin with its first N iterations{_AT}; RUN for all of them. {RUN_HELP}")
]
RunArguments = Annotated[RunLike | Sequence[RunLike], _runs(f"{RUN_HELP} Repeatable; all by default.")]
RemovedArguments = Annotated[RunLike | Sequence[RunLike], _runs(f"{RUN_HELP} Repeatable.")]
RunsArgument = Annotated[
    RunLike | Sequence[RunLike],
    _runs("Names under the runs folder, paths, patterns such as `lr-*`, or the names of sweeps."),
]
Iteration = Annotated[int | None, Parameter(parse=False)]  # iteration; the command line uses RUN@ITERATION instead
Overrides = Annotated[
    Sequence[str], Parameter(name="--set", help="Change a setting: `--set algorithm.inner_lr=0.05`. Repeatable.")
]
InProcess = Annotated[Backend, "in this process unless workers or a scheduler are given"]
Trust = Annotated[
    bool,
    Parameter(
        help="Allow importing the modules that the run's settings name, now and later. For runs made by others, "
        "inspect the modules first."
    ),
]
MetricsPort = Annotated[
    Port | None,
    Parameter(help="Port at which Prometheus can scrape the training on this machine: http://127.0.0.1:PORT/metrics."),
]
Log = Annotated[
    Sequence[str],
    Parameter(
        help="Also log to `tensorboard`, `wandb` (offline) or `mlflow` (each requires the extra of that name), or call "
        "module:function with each finished iteration. Repeatable."
    ),
]
FilmEvery = Annotated[Positive | None, Parameter(help="With --log, make videos of every N-th iteration and the last.")]
PythonOnly: Parameter = Parameter(parse=False)  # marks a Python-only parameter


def agree(run: Path, trust: bool) -> None:
    """Trust the modules that a run's settings name, if `trust` is True."""
    if trust:
        late.trust_run(run)


def changes(overrides: Sequence[str], settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return changes to settings, given as KEY=VALUE or as keyword arguments, as a list of KEY=VALUE strings."""
    return [*overrides, *late.assignments(settings or {})]


def refuse_without(option: str, **others: object) -> None:
    """Raise UsageError if any of the other options is given, since each of them requires `option`."""
    for name in _given(others):
        raise UsageError(f"--{name} requires {option}; add {option}, or remove --{name}")


def refuse_with(option: str, **others: object) -> None:
    """Raise UsageError if any of the other options is given, since none of them can be combined with `option`."""
    for name in _given(others):
        raise UsageError(f"--{name} cannot be combined with {option}; remove one of them")


def _given(options: dict[str, object]) -> list[str]:
    return [name.replace("_", "-") for name, value in options.items() if value is not None and value is not False]
