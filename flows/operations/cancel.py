"""`cancel`: stops the training of a run after its current stage.

The writer checks for requests before every stage. Unlike a signal, a request cannot reach an unrelated process
that reuses the process ID, and any process that shares the folder can make one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import PythonOnly, RunArgument
from metaloom.flows.runs import folder_of
from metaloom.storage import Writer
from metaloom.storage.errors import system_errors


@dataclass(frozen=True)
class Cancelled:
    """State of a run after its writer was asked to stop; `went_well` is False if the training failed instead."""

    went_well: bool
    message: str

    def __str__(self) -> str:
        return self.message


LOOK_SECONDS = 0.2


@checked
def cancel(run: RunArgument, *, asked: Annotated[Callable[[Writer], None] | None, PythonOnly] = None) -> Cancelled:
    """Stop training a run after its current stage.

    The command asks the process that trains the run to stop, like a single Ctrl-C, and waits until it has stopped. It
    works from another shell, under Prefect, and from another machine that shares the folder. `metaloom resume`
    continues the run. A process that is suspended (Ctrl-Z, SIGSTOP) or hangs does not respond: `kill -CONT PID` wakes
    it, and `kill -9 PID` ends it without losing stored outputs. If its machine is gone,
    `metaloom resume RUN --take-over` continues the run without it.

    Exit code 0 if the run stopped, was already complete, or was not being written; 1 if it failed instead.

    Example: `metaloom cancel first`

    Args:
        run: Run to stop.
        asked: Called with the writer when it is asked to stop.
    """
    folder = folder_of(run)
    writer = ask_to_stop(folder)
    if writer is not None:
        if asked is not None:
            asked(writer)
        wait_for_end(folder, writer, wait=time.sleep)
        storage.withdraw(folder, writer.token)
    watch = late.Watch(folder)
    watch.look()
    if watch.writer is not None:
        return Cancelled(True, f"it stopped; {watch.writer} has since continued the run")
    ending = watch.ending()
    if writer is None:
        return Cancelled(True, f"no process is writing it: {ending.message}")
    return Cancelled(ending.went_well, ending.message)


def ask_to_stop(path: Path) -> Writer | None:
    """Ask the process that is writing a run to stop after its stage; return that process, or None if there is none."""
    run = storage.open_run(path)
    writer = storage.current_writer(path, run.files.remote)
    if writer is None:
        return None
    if storage.url_of(path) and not writer.is_here:
        raise UsageError(
            f"{run.location} is being written by {writer}, and stop requests reach other machines only through a "
            f"shared folder. Run `metaloom cancel {storage.argument(run.path)}` on {writer.host}"
        )
    if not writer.listens:
        raise UsageError(
            f"{run.location} is being written by {writer}, whose version does not support stop requests. "
            f"`kill -INT {writer.pid}` on {writer.host} stops it as Ctrl-C does"
        )
    with system_errors(
        path,
        required="a folder in which the request can be written",
        action=f"Free space, or check its permissions; or `kill -INT {writer.pid}` on {writer.host}",
    ):
        storage.ask_to_stop(path, writer.token)
    return writer


def wait_for_end(path: Path, writer: Writer, *, wait: Callable[[float], None]) -> None:
    """Wait until a writer has released the run or its process has ended."""
    while (now := storage.current_writer(path)) is not None and now.token == writer.token:
        wait(LOOK_SECONDS)
