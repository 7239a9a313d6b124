"""The option `--install-completion`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.cli import app
from metaloom.flows.cli.output import console
from metaloom.flows.errors import UsageError

Shell = Literal["bash", "zsh", "fish"]
Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]

_NEXT = {
    "bash": "start a new shell, or: source ~/.bashrc",
    "zsh": "start a new shell, or: exec zsh (your .zshrc has to call compinit, as most do)",
    "fish": "start a new shell, or: source ~/.config/fish/config.fish",
}


def install(*, shell: Shell | None = None, output: Output = None) -> int:
    """Install shell completion for commands, options, runs and recipes.

    Args:
        shell: Shell; by default, the current one.
        output: File for the script; by default, where the shell looks for it.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    if shell is None:
        with suppress(ShellDetectionError):
            found = detect_shell()
            shell = None if found == "powershell" else found
    if shell is None:
        raise UsageError("could not detect a supported shell; pass --shell bash, zsh or fish")
    place = app.install_completion(shell=shell, output=output, add_to_startup=True)
    console().out(f"completion for {shell} is in {place}; {_NEXT[shell]}")
    return 0
