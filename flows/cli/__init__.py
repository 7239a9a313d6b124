"""The command line. Exit codes: 0 success, 1 a difference or failure, 2 wrong usage, 130 stopped by Ctrl-C.

Commands are generated from the table of operations (`flows/operations`); this package adds terminal output. Numerics
are imported through `operations/late.py`, so that help, listings and errors do not wait for torch.
"""

import gc

_COLLECTS = gc.isenabled()
gc.disable()  # no object that an import creates is freed; see `pipeline/lazy.py`

import atexit
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path

from cyclopts import App, CycloptsError, CycloptsPanel, Group, UnknownOptionError, UnusedCliTokensError
from rich.panel import Panel

import metaloom
from metaloom.flows.cli.output import (
    EXIT_OUTPUT_CLOSED,
    OutputClosed,
    PipeConsole,
    PrintableLines,
    console,
    discard_output,
)
from metaloom.flows.errors import EXIT_INTERRUPTED, FAILURE, USAGE, StartAgain, exit_code, exit_text, explained
from metaloom.flows.operations import late, operations
from metaloom.flows.operations.options import complete_runs
from metaloom.flows.streams import data_stream, keep_output_for_data, keep_streams
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import error_text, printable
from metaloom.storage import RunNotFound

gc.freeze()
if _COLLECTS:
    gc.enable()

GROUPS = list(dict.fromkeys(operation.group for operation in operations().values()))
"""Titles of the command groups, in the order of `--help`."""

_SHOW_THEMSELVES = {"serve", "logs"}  # commands that print while they run
_TRAIN = {"train", "resume", "sweep"}
"""Commands that print their own lines, and therefore have no status line in files and pipes."""

COMMANDS = [*operations()]
_PATIENCE_SECONDS = 3


def _explain(error: CycloptsError) -> Panel:
    """Return the message for a wrong command line, in a frame."""
    if isinstance(error, UnknownOptionError):
        found = error.token.keyword or error.token.value
        options = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
        # Compare without dashes, which make all options look similar.
        hint = late.suggestion(found.lstrip("-"), [name.lstrip("-") for name in options])
        hint = hint.replace("; did you mean ", "\ndid you mean --")
        if "--set" in options:
            hint += "\n`--set NAME=VALUE` changes a setting"
    elif isinstance(error, UnusedCliTokensError):
        found, hint = " ".join(error.unused_tokens or ()), ""
    else:
        return CycloptsPanel(error)
    command = " ".join(["metaloom", *(error.command_chain or ())])
    return CycloptsPanel(printable(f"{command} does not accept {found}{hint}\n`{command} --help` lists its options"))


app: App = App(
    error_formatter=_explain,
    console=PipeConsole(),
    error_console=PipeConsole(stderr=True),
    name="metaloom",
    help=(metaloom.__doc__ or "").partition("\n")[0],
    help_format="markdown",
    version=metaloom.__version__,
    version_flags=["--version"],
    group_commands=Group("Options", sort_key=len(GROUPS)),
    suppress_keyboard_interrupt=False,
)
_groups = {title: Group(title, sort_key=order) for order, title in enumerate(GROUPS)}
for _rank, (_name, _operation) in enumerate(operations().items()):
    app.command(
        _operation.command or f"{__name__}.generated:command_{_name}",
        name=_name,
        group=_groups[_operation.group],
        sort_key=_rank,
    )


app.command(
    f"{__name__}.completion:install", name="--install-completion", help="Install completion for bash, zsh or fish."
)


def main() -> None:
    """Entry point of the `metaloom` command."""
    keep_streams()
    if "--json" in sys.argv:
        keep_output_for_data()
    # If an environment crashes this process (`--workers 0`), print at least a traceback.
    faulthandler.enable()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())
    try:
        code = run(sys.argv[1:])
    except StartAgain as again:
        # exec keeps the process, so signals and the exit code need no forwarding.
        os.dup2(data_stream().fileno(), 1)
        os.execve(sys.executable, sys.orig_argv, again.environment)
    try:
        data_stream().flush()
    except BrokenPipeError:
        discard_output()
        code = code or EXIT_OUTPUT_CLOSED
    if code == EXIT_INTERRUPTED:  # skip the teardown of modules, which takes seconds
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        os._exit(code)
    late_threads = threading.Timer(_PATIENCE_SECONDS, _name_threads)
    late_threads.daemon = True
    with suppress(RuntimeError):  # no more threads can be started
        late_threads.start()
    sys.exit(code)


def _name_threads() -> None:
    """Print the names of the threads, such as a plug-in's, that Python waits for before the process ends."""
    if names := [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]:
        print(
            f"metaloom: done, but these threads are still running: {printable(', '.join(names))}; Ctrl-C ends them",
            file=sys.stderr,
        )


def _status(tokens: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context manager that shows a status line with the command's first words, or nothing."""
    if not tokens or tokens[0] not in {*COMMANDS} - _SHOW_THEMSELVES or {*tokens} & {"--json", "--help", "-h"}:
        return nullcontext()
    if tokens[0] in _TRAIN and not console().is_terminal:
        return nullcontext()
    words = takewhile(lambda token: not token.startswith("-"), tokens)
    return STATUS.shown(" ".join(map(printable, words)), console())


def run(tokens: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    if [*tokens] in ([], ["-h"], ["--help"]):
        for name in COMMANDS:  # import lazy commands, whose modules contain their help
            app[name]
    try:
        with _status(tokens):
            return app(tokens, exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:
        return USAGE  # cyclopts has printed the error
    except OutputClosed:
        discard_output()
        return EXIT_OUTPUT_CLOSED
    except KeyboardInterrupt:
        print("metaloom: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as ended:
        print(f"metaloom: {printable(exit_text(ended))}", file=sys.stderr)
        return FAILURE
    except Exception as raised:
        error = explained(raised)
        code = exit_code(error)
        if code is None:
            raise
        # Suggest an existing run with a similar name.
        similar = late.suggestion(Path(error.where).name, complete_runs(None)) if isinstance(error, RunNotFound) else ""
        print(f"metaloom: {error_text(error)}{similar}", file=sys.stderr)
        return code
