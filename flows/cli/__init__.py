"""The command line. Exit codes: 0 done, 1 found a difference or a failure, 2 wrong usage, 130 stopped by Ctrl-C.

Each command is a function in a module of this package and a line in `GROUPS`. Its docstring is its help text. Modules
import numerics inside the functions, because help, lists and refusals should not wait seconds for torch;
tests/flows/test_startup.py holds them to it.
"""

import atexit
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path

from cyclopts import App, CycloptsError, CycloptsPanel, Group, UnknownOptionError, UnusedCliTokensError
from rich.panel import Panel

import metaloom
from metaloom.flows.cli.options import complete_runs
from metaloom.flows.cli.output import (
    EXIT_OUTPUT_CLOSED,
    OutputClosed,
    PipeConsole,
    PrintableLines,
    console,
    discard_output,
)
from metaloom.flows.errors import EXIT_INTERRUPTED, USAGE, StartAgain, exit_code
from metaloom.flows.streams import keep_streams
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import error_text, printable

GROUPS = {
    "Train": {
        "train": "train:train",
        "resume": "train:resume",
        "fork": "fork:fork",
        "sweep": "sweep:sweep",
        "watch": "watch:watch",
        "cancel": "cancel:cancel",
        "recipes": "recipes:recipes",
    },
    "Look": {
        "ls": "ls:list_runs",
        "show": "show:show",
        "view": "view:view",
        "report": "report:report",
        "video": "video:video",
        "logs": "logs:logs",
        "graph": "graph:graph",
    },
    "Debug": {
        "replay": "replay:replay",
        "optimize": "optimize:optimize",
        "doctor": "doctor:doctor",
    },
    "Compare": {
        "evaluate": "evaluate:evaluate",
        "compare": "compare:compare",
        "diff": "diff:diff",
        "reference": "reference:reference",
    },
    "Keep": {
        "verify": "verify:verify",
        "du": "du:du",
        "thin": "thin:thin",
        "pack": "pack:pack",
        "rm": "rm:rm",
        "export": "export:export",
    },
    "Deploy": {
        "policy": "policy:policy",
        "serve": "serve:serve",
    },
}
"""Command groups in the order of `--help`: command -> "module:function" in this package, imported when it is used."""

_SHOW_THEMSELVES = {"serve", "logs"}
"""Commands that print as long as they run."""
_TRAIN = {"train", "resume", "sweep"}
"""Commands whose own lines follow; what reads them from a file or pipe expects no others."""

COMMANDS = [name for group in GROUPS.values() for name in group]


def _explain(error: CycloptsError) -> Panel:
    """Explain in a frame what is wrong with a command line."""
    if isinstance(error, UnknownOptionError):
        from metaloom.pipeline.schema import suggestion  # imports pydantic, which takes longer than all above

        found = error.token.keyword or error.token.value
        options = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
        # Without the dashes, which make any two options resemble each other.
        hint = suggestion(found.lstrip("-"), [name.lstrip("-") for name in options])
        hint = hint.replace("; did you mean ", "\ndid you mean --")
        if "--set" in options:
            hint += "\n`--set NAME=VALUE` changes a setting"
    elif isinstance(error, UnusedCliTokensError):
        found, hint = " ".join(error.unused_tokens or ()), ""
    else:
        return CycloptsPanel(error)
    command = " ".join(["metaloom", *(error.command_chain or ())])
    return CycloptsPanel(
        printable(f"found {found}, which {command} does not take{hint}\n`{command} --help` lists what it does")
    )


app = App(
    error_formatter=_explain,
    console=PipeConsole(),
    error_console=PipeConsole(stderr=True),
    name="metaloom",
    help=(metaloom.__doc__ or "").partition("\n")[0],
    help_format="markdown",
    version=metaloom.__version__,
    version_flags=["--version"],
    group_commands=Group("Options", sort_key=len(GROUPS)),
)
for _order, (_title, _commands) in enumerate(GROUPS.items()):
    _group = Group(_title, sort_key=_order)
    for _rank, (_name, _place) in enumerate(_commands.items()):
        app.command(f"{__name__}.{_place}", name=_name, group=_group, sort_key=_rank)


app.command(
    f"{__name__}.completion:install",
    name="--install-completion",
    help="Install completion for bash, zsh or fish.",
)


def main() -> None:
    """Entry point of the `metaloom` command."""
    keep_streams()
    # An environment that crashes this process (`--workers 0`) leaves at least a traceback.
    faulthandler.enable()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())
    try:
        code = run(sys.argv[1:])
    except StartAgain as again:
        # The same process under another environment: Ctrl-C, signals and the exit code need no passing on.
        os.execve(sys.executable, sys.orig_argv, again.environment)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        code = code or EXIT_OUTPUT_CLOSED
    if code == EXIT_INTERRUPTED:  # there may be no time left to take all modules apart, which takes seconds
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        os._exit(code)
    sys.exit(code)


def _status(tokens: Sequence[str]) -> AbstractContextManager[None]:
    """Return the status of a command: its first words, which say what it does and to what."""
    if not tokens or tokens[0] not in {*COMMANDS} - _SHOW_THEMSELVES or {*tokens} & {"--json", "--help", "-h"}:
        return nullcontext()
    if tokens[0] in _TRAIN and not console().is_terminal:
        return nullcontext()
    words = takewhile(lambda token: not token.startswith("-"), tokens)
    return STATUS.shown(" ".join(map(printable, words)), console())


def run(tokens: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if [*tokens] in ([], ["-h"], ["--help"]):
        for name in COMMANDS:  # what a command does is told by its docstring, which is in its module
            app[name]
    try:
        with _status(tokens):
            return app(tokens, exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:
        return USAGE  # cyclopts has printed what is wrong
    except OutputClosed:
        discard_output()
        return EXIT_OUTPUT_CLOSED
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        from metaloom.pipeline.schema import suggestion
        from metaloom.storage import RunNotFound

        # The name may be close to that of an existing run.
        similar = suggestion(Path(error.where).name, complete_runs(None)) if isinstance(error, RunNotFound) else ""
        print(f"metaloom: {error_text(error)}{similar}", file=sys.stderr)
        return code
