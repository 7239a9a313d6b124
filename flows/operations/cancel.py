"""`cancel`: the training of a run stops after its current stage."""

import time
from collections.abc import Callable
from typing import Annotated

from metaloom.flows.operations.options import PythonOnly, RunArgument
from metaloom.flows.results.cancel import Cancelled
from metaloom.flows.runs import folder_of
from metaloom.storage import Writer


def cancel(run: RunArgument, *, asked: Annotated[Callable[[Writer], None] | None, PythonOnly] = None) -> Cancelled:
    """Stop the training of a run after its current stage.

    It asks the process that trains the run to stop, as one Ctrl-C does, and waits until that is done.

    Works from another shell, under Prefect too, and on another machine that shares the folder. `metaloom resume`
    goes on. A process that is stopped (Ctrl-Z, SIGSTOP) or hangs hears nothing: `kill -CONT PID` lets it go on, or
    `kill -9 PID` ends it, which loses nothing that is stored. If its machine is gone, `metaloom resume RUN --take-over`
    goes on without it.

    Exit code 0 when the run stopped, was complete first, or is written by nobody; 1 when it failed instead.

    Example: `metaloom cancel first`

    Args:
        run: The run.
        asked: Called with the writer once it is asked to stop.
    """
    from metaloom.flows.commands.cancel import ask_to_stop, wait_for_end, withdraw
    from metaloom.flows.views.watching import Watch

    folder = folder_of(run)
    writer = ask_to_stop(folder)
    if writer is not None:
        if asked is not None:
            asked(writer)
        wait_for_end(folder, writer, wait=time.sleep)
        withdraw(folder, writer)
    watch = Watch(folder)
    watch.look()
    if watch.writer is not None:
        return Cancelled(True, f"it stopped, and {watch.writer} has gone on with the run since")
    ending = watch.ending()
    return Cancelled(
        writer is None or ending.went_well, f"{'nobody writes it: ' if writer is None else ''}{ending.message}"
    )
