"""The command line. Exit codes: 0 done, 1 found a difference or a failure, 2 wrong usage, 130 stopped by Ctrl-C.

Each command is a function in a module of this package and a line in `COMMANDS`. Its docstring is its help text. Modules
import numerics inside the functions, because help, lists and refusals should not wait seconds for torch;
tests/flows/test_startup.py holds them to it.
"""

import faulthandler
import logging
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, CycloptsPanel, UnusedCliTokensError
from rich.panel import Panel

import metaloom
from metaloom.flows.cli.output import EXIT_OUTPUT_CLOSED, OutputClosed, PipeConsole, PrintableLines, discard_output
from metaloom.flows.errors import USAGE, exit_code
from metaloom.flows.streams import keep_streams
from metaloom.pipeline.shown import printable

COMMANDS = {
    "train": "train:train",
    "resume": "train:resume",
    "replay": "replay:replay",
    "optimize": "optimize:optimize",
    "sweep": "sweep:sweep",
    "evaluate": "evaluate:evaluate",
    "compare": "compare:compare",
    "fork": "fork:fork",
    "thin": "thin:thin",
    "pack": "pack:pack",
    "diff": "diff:diff",
    "ls": "ls:list_runs",
    "show": "show:show",
    "watch": "watch:watch",
    "cancel": "cancel:cancel",
    "logs": "logs:logs",
    "du": "du:du",
    "rm": "rm:rm",
    "verify": "verify:verify",
    "report": "report:report",
    "video": "video:video",
    "view": "view:view",
    "export": "export:export",
    "policy": "policy:policy",
    "reference": "reference:reference",
    "recipes": "recipes:recipes",
    "graph": "graph:graph",
    "serve": "serve:serve",
    "doctor": "doctor:doctor",
}
"""Name of the command -> "module:function" in this package, or a group of them, imported when it is used."""


def _explain(error: CycloptsError) -> Panel:
    """What is wrong with a command line, in a frame."""
    if not isinstance(error, UnusedCliTokensError):
        return CycloptsPanel(error)
    command = " ".join(["metaloom", *(error.command_chain or ())])
    tokens = " ".join(error.unused_tokens or ())
    return CycloptsPanel(
        printable(f"found {tokens}, which {command} does not take; `{command} --help` lists what it does")
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
)
for _name, _place in COMMANDS.items():
    app.command(f"{__name__}.{_place}", name=_name)


app.command(
    f"{__name__}.completion:install",
    name="--install-completion",
    help="Install completion for the shell in use (bash, zsh, fish): commands, options, names of runs and recipes.",
)


def main() -> None:
    """Entry point of the `metaloom` command."""
    keep_streams()
    # An environment that crashes this process (`--workers 0`) leaves at least a traceback.
    faulthandler.enable()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        code = code or EXIT_OUTPUT_CLOSED
    sys.exit(code)


def run(tokens: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if [*tokens] in ([], ["-h"], ["--help"]):
        for name in COMMANDS:  # what a command does is told by its docstring, which is in its module
            app[name]
    try:
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
        print(f"metaloom: {printable(error)}", file=sys.stderr)
        return code
