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
    """Entry in the table of operations.

    Attributes:
        name: Name of the command and of the Python function.
        group: Group of commands in `--help`.
        run: Function that does the work, "module:function".
        view: Function that renders the result for a terminal, "module:function"; by default it is printed.
        good: Attribute of the result that is True for exit code 0; without one, the exit code is always 0.
        terminal: Function that prints or asks while the operation runs, "module:function". Its first argument calls the
            operation; its keyword arguments are command-only options.
        has_json: True to offer `--json`, which prints the result as data.
        command: Group of commands, "module:name" of an App, instead of a function.
        of_terminal: Command-only options, each with its Python equivalent or the reason why there is none.
    """

    name: str
    group: str
    run: str = ""
    view: str = ""
    good: str = "ok"
    terminal: str = ""
    has_json: bool = True
    command: str = ""
    of_terminal: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def function(self) -> Callable[..., Any]:
        """Function that does the work; for installed operations, its arguments are checked."""
        found = resolve(self.run)
        return _checked(found) if self.group == INSTALLED else found

    def broken(self, problem: BaseException) -> str:
        """Return a message that explains why an installed operation cannot be used."""
        return (
            f"the operation {self.name!r} of an installed package ({self.run}) cannot be used: "
            f"{type(problem).__name__}: {problem}"
        )

    def succeeded(self, result: Any) -> bool:
        """Return True if a command with this result ends with exit code 0."""
        return bool(getattr(result, self.good, True))


INSTALLED = "Installed"
"""Group of operations added by other packages."""

_VIEWS, _CLI = "metaloom.flows.views", "metaloom.flows.cli"

_BUILT_IN = (
    Operation(
        "train",
        "Train",
        f"{HERE}.train:train",
        terminal=f"{_CLI}.train:train",
        of_terminal={
            "dry_run": "prints a forecast; stopping a loop over `iterate` early measures the same",
            "probe": "is part of `--dry-run`",
        },
    ),
    Operation("resume", "Train", f"{HERE}.train:resume", terminal=f"{_CLI}.train:shown"),
    Operation("fork", "Train", f"{HERE}.fork:fork", terminal=f"{_CLI}.terminal:fork", has_json=False),
    Operation(
        "sweep",
        "Train",
        f"{HERE}.sweep:sweep",
        terminal=f"{_CLI}.train:sweep",
        of_terminal={"status": '`open_runs("NAME-*")` opens existing runs', "dry_run": "prints the planned runs"},
    ),
    Operation("watch", "Train", f"{HERE}.watch:watch", terminal=f"{_CLI}.terminal:watch"),
    Operation("cancel", "Train", f"{HERE}.cancel:cancel", terminal=f"{_CLI}.terminal:cancel", has_json=False),
    Operation(
        "recipes",
        "Train",
        f"{HERE}.recipes:recipes",
        terminal=f"{_CLI}.terminal:recipes",
        of_terminal={
            "recipe": "`load_settings(RECIPE)`",
            "format": "prints a file",
            "set": "is part of printing a file",
            "schema": "`RunConfig.model_json_schema()`",
            "envs": "`metaloom.pipeline.envs.PLUGINS.names()`",
        },
    ),
    Operation("ls", "Look", f"{HERE}.ls:ls", view=f"{_VIEWS}.tables:runs_view"),
    Operation(
        "show", "Look", f"{HERE}.show:show", terminal=f"{_CLI}.terminal:show", of_terminal={"all": "`show` returns all"}
    ),
    Operation("view", "Look", f"{HERE}.view:view", terminal=f"{_CLI}.terminal:view", has_json=False),
    Operation("report", "Look", f"{HERE}.report:report", has_json=False),
    Operation("video", "Look", f"{HERE}.video:video", good="agrees", has_json=False),
    Operation(
        "logs",
        "Look",
        f"{HERE}.logs:logs",
        terminal=f"{_CLI}.terminal:logs",
        of_terminal={"follow": "prints lines as they come; another call of `logs` returns them"},
    ),
    Operation("graph", "Look", f"{HERE}.graph:graph", terminal=f"{_CLI}.terminal:graph", has_json=False),
    Operation(
        "replay",
        "Debug",
        f"{HERE}.replay:replay",
        good="identical",
        terminal=f"{_CLI}.terminal:replay",
        of_terminal={
            "pdb": "enters the debugger, which needs the terminal",
            "materialise": "`materialise(RUN, ITERATION)`",
            "quarantine": "prints the error of the episode, or enters the debugger",
            "as_recorded": "restarts the process, because libraries choose their machine code when imported",
        },
    ),
    Operation(
        "optimize",
        "Debug",
        f"{HERE}.optimize:optimize",
        terminal=f"{_CLI}.terminal:optimize",
        of_terminal={"grid": "call `optimize` once per value"},
    ),
    Operation("doctor", "Debug", f"{HERE}.doctor:doctor", view=f"{_VIEWS}.tables:doctor_view"),
    Operation(
        "evaluate",
        "Compare",
        f"{HERE}.evaluate:evaluate",
        view=f"{_VIEWS}.tables:evaluation_view",
        terminal=f"{_CLI}.terminal:evaluate",
        of_terminal={"plot": "`evaluate(...).plot()`", "video": "writes a file; `tested=` receives the test episodes"},
    ),
    Operation(
        "compare",
        "Compare",
        f"{HERE}.compare:compare",
        view=f"{_VIEWS}.tables:comparison_view",
        terminal=f"{_CLI}.terminal:compare",
        of_terminal={"plot": "`compare(...).plot()`"},
    ),
    Operation("diff", "Compare", f"{HERE}.diff:diff", view=f"{_VIEWS}.tables:diff_view", good="equal"),
    Operation("reference", "Compare", command=f"{_CLI}.reference:reference"),
    Operation("verify", "Keep", f"{HERE}.verify:verify", view=f"{_VIEWS}.tables:verification_view", good="intact"),
    Operation("du", "Keep", f"{HERE}.du:du", view=f"{_VIEWS}.tables:disk_view"),
    Operation("thin", "Keep", f"{HERE}.thin:thin"),
    Operation("pack", "Keep", f"{HERE}.pack:pack"),
    Operation(
        "rm",
        "Keep",
        f"{HERE}.rm:rm",
        terminal=f"{_CLI}.terminal:rm",
        has_json=False,
        of_terminal={"yes": "Python does not ask"},
    ),
    Operation("export", "Keep", f"{HERE}.export:export", view=f"{_VIEWS}.tables:export_view"),
    Operation("policy", "Deploy", f"{HERE}.policy:policy", terminal=f"{_CLI}.terminal:policy", has_json=False),
    Operation("serve", "Deploy", "metaloom.flows.prefect_app.operation:serve", has_json=False),
)

REFERENCE = (
    Operation("ls", "", f"{HERE}.reference:ls", view="metaloom.flows.references.index:references_table"),
    Operation("show", "", f"{HERE}.reference:show", terminal=f"{_CLI}.reference:show"),
    Operation("verify", "", f"{HERE}.reference:verify", good="identical", terminal=f"{_CLI}.reference:verify"),
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
        if (
            in_python in ours
            or name in found
            or iskeyword(in_python)
            or not name[0].isalpha()
            or not in_python.isidentifier()
        ):
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
