"""Table of operations, each a typed Python function from which its command, Prefect flow and documentation are derived.

The table contains names instead of functions, and operations import numerics through `late.py`, so that help, listings
and errors do not wait seconds for torch (tests/flows/test_startup.py). An installed package adds operations through the
entry point group `metaloom.operations`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Any

from metaloom.pipeline.lazy import installed, lazy_names

HERE = __name__
log: logging.Logger = logging.getLogger(__name__)


def resolve(place: str) -> Any:
    """Return the object named "module:name", importing its module."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    from metaloom.flows.arguments import checked  # imports cyclopts, which reading a run does not need

    return checked(function)


@dataclass(frozen=True)
class Operation:
    """Entry in the table of operations. Functions are named "module:function"."""

    name: str
    group: str  # group of commands in `--help`
    run: str = ""  # function that does the work
    view: str = ""  # function that renders the result for a terminal; by default, the result is printed
    good: str = "ok"  # attribute of the result that is True for exit code 0; without one, the exit code is always 0
    # Function that prints or asks while the operation runs. Its first argument calls the operation; its keyword
    # arguments are command-only options.
    terminal: str = ""
    has_json: bool = True  # True to offer `--json`, which prints the result as data
    command: str = ""  # App that contains a group of commands, instead of a function
    # Command-only options, each with its Python equivalent or why there is none.
    of_terminal: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def function(self) -> Callable[..., Any]:
        """Function that does the work, with its arguments checked if the operation is installed."""
        found = resolve(self.run)
        return _checked(found) if self.group == INSTALLED else found

    def broken(self, problem: BaseException) -> str:
        """Return a message that explains why an installed operation cannot be used."""
        return f"the installed operation {self.name!r} ({self.run}) cannot be used: {type(problem).__name__}: {problem}"

    def succeeded(self, result: Any) -> bool:
        """Return True if a command with this result ends with exit code 0."""
        return bool(getattr(result, self.good, True))


INSTALLED = "Installed"  # group of operations added by other packages


def _built_in(name: str, group: str, *, view: str = "", terminal: str = "", **options: Any) -> Operation:
    """Return an operation whose module and function have its name, viewed by `flows.views.tables`."""
    view, terminal = view and f"metaloom.flows.views.tables:{view}", terminal and f"metaloom.flows.cli.{terminal}"
    return Operation(name, group, f"{HERE}.{name}:{name}", view, terminal=terminal, **options)


_BUILT_IN = (
    _built_in(
        "train",
        "Train",
        terminal="train:train",
        of_terminal={
            "dry_run": "prints a forecast; stopping a loop over `iterate` early measures the same",
            "probe": "is part of `--dry-run`",
        },
    ),
    Operation("resume", "Train", f"{HERE}.train:resume", terminal="metaloom.flows.cli.train:shown"),
    _built_in("fork", "Train", terminal="terminal:fork", has_json=False),
    _built_in(
        "sweep",
        "Train",
        terminal="train:sweep",
        of_terminal={"status": '`open_runs("NAME-*")` opens existing runs', "dry_run": "prints the planned runs"},
    ),
    _built_in("watch", "Train", terminal="terminal:watch"),
    _built_in("cancel", "Train", terminal="terminal:cancel", has_json=False),
    _built_in(
        "recipes",
        "Train",
        terminal="terminal:recipes",
        of_terminal={
            "recipe": "`load_settings(RECIPE)`",
            "format": "prints a file",
            "set": "is part of printing a file",
            "schema": "`RunConfig.model_json_schema()`",
            "envs": "`metaloom.pipeline.envs.PLUGINS.names()`",
        },
    ),
    _built_in("ls", "Look", view="runs_view"),
    _built_in("show", "Look", terminal="terminal:show", of_terminal={"all": "`show` returns all"}),
    _built_in("view", "Look", terminal="terminal:view", has_json=False),
    _built_in("report", "Look", has_json=False),
    _built_in("video", "Look", good="agrees", has_json=False),
    _built_in(
        "logs",
        "Look",
        terminal="terminal:logs",
        of_terminal={"follow": "prints lines as they come; another call of `logs` returns them"},
    ),
    _built_in("graph", "Look", terminal="terminal:graph", has_json=False),
    _built_in(
        "replay",
        "Debug",
        good="identical",
        terminal="terminal:replay",
        of_terminal={
            "pdb": "enters the debugger, which needs the terminal",
            "materialise": "`materialise(RUN, ITERATION)`",
            "quarantine": "prints the error of the episode, or enters the debugger",
            "as_recorded": "restarts the process, because libraries choose their CPU code paths when imported",
        },
    ),
    _built_in(
        "optimize", "Debug", terminal="terminal:optimize", of_terminal={"grid": "call `optimize` once per value"}
    ),
    _built_in("doctor", "Debug", view="doctor_view"),
    _built_in(
        "evaluate",
        "Compare",
        view="evaluation_view",
        terminal="terminal:evaluate",
        of_terminal={"plot": "`evaluate(...).plot()`", "video": "writes a file; `tested=` receives the test episodes"},
    ),
    _built_in(
        "compare",
        "Compare",
        view="comparison_view",
        terminal="terminal:compare",
        of_terminal={"plot": "`compare(...).plot()`"},
    ),
    _built_in("diff", "Compare", view="diff_view", good="equal"),
    Operation("reference", "Compare", command="metaloom.flows.cli.reference:reference"),
    _built_in("verify", "Keep", view="verification_view", good="intact"),
    _built_in("du", "Keep", view="disk_view"),
    _built_in("thin", "Keep"),
    _built_in("pack", "Keep"),
    _built_in("rm", "Keep", terminal="terminal:rm", has_json=False, of_terminal={"yes": "Python does not ask"}),
    _built_in("export", "Keep", view="export_view"),
    _built_in("policy", "Deploy", terminal="terminal:policy", has_json=False),
    Operation("serve", "Deploy", "metaloom.flows.prefect_app.operation:serve", has_json=False),
)

REFERENCE = (
    Operation("ls", "", f"{HERE}.reference:ls", view="metaloom.flows.references.index:references_table"),
    Operation("show", "", f"{HERE}.reference:show", terminal="metaloom.flows.cli.reference:show"),
    Operation(
        "verify", "", f"{HERE}.reference:verify", good="identical", terminal="metaloom.flows.cli.reference:verify"
    ),
    Operation("extract", "", f"{HERE}.reference:extract"),
    Operation("add", "", f"{HERE}.reference:add"),
)
"""Operations on references: `metaloom reference ls`, `metaloom.reference.ls`."""

_PACKAGES = ("flows", "pipeline", "stages", "storage")


@cache
def operations() -> Mapping[str, Operation]:
    """Return all operations, keyed by name, in the order of `--help`.

    An installed operation whose name is invalid or already in use is skipped with a warning.
    """
    found = {operation.name: operation for operation in _BUILT_IN}
    ours = {*found, *lazy_names("metaloom"), *_PACKAGES}
    for point in installed("metaloom.operations"):
        name, in_python = point.name.replace("_", "-"), point.name.replace("-", "_")
        is_valid = name[0].isalpha() and in_python.isidentifier() and not iskeyword(in_python)
        if not is_valid or in_python in ours or name in found:
            package = point.dist.name if point.dist else "an installed package"
            log.warning(
                "%s: skipped the operation %r (%s); its name must be a valid Python identifier that is not already "
                "in use",
                package,
                point.name,
                point.value,
            )
        else:
            found[name] = Operation(name, INSTALLED, point.value)
    return found
