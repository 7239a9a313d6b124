"""`metaloom cancel`."""

import time

from metaloom.flows.cli.options import RunArgument
from metaloom.flows.cli.output import console
from metaloom.flows.runs import run_folder


def cancel(run: RunArgument) -> int:
    """Stop the training of a run after its current stage.

    It asks the process that trains the run to stop, as one Ctrl-C does, and waits until that is done.

    Works from another shell, under Prefect too, and on another machine that shares the folder. `metaloom resume`
    goes on. A process that is stopped (Ctrl-Z, SIGSTOP) or hangs hears nothing: `kill -CONT PID` lets it go on, or
    `kill -9 PID` ends it, which loses nothing that is stored. If its machine is gone, `metaloom resume RUN --take-over`
    goes on without it.

    Exit code 0 when the run stopped, was complete first, or is written by nobody; 1 when it failed instead.

    Example: `metaloom cancel first`
    """
    from metaloom.flows.commands.cancel import ask_to_stop, wait_for_end, withdraw
    from metaloom.flows.views.watching import Watch

    folder = run_folder(run)
    tell = console().out
    writer = ask_to_stop(folder)
    if writer is not None:
        tell(f"asked {writer} to finish its stage and stop; Ctrl-C ends this wait, and the request stands")
        if writer.is_stopped:
            again, end = (f"kill -{signal} {writer.pid}" for signal in ("CONT", 9))
            tell(f"it is stopped and hears nothing; `{again}` lets it go on, `{end}` ends it")
        try:
            wait_for_end(folder, writer, wait=time.sleep)
        except KeyboardInterrupt:
            tell("\nno longer waiting; the request stands")
            return 0
        withdraw(folder, writer)
    watch = Watch(folder)
    watch.look()
    if watch.writer is not None:
        tell(f"it stopped, and {watch.writer} has gone on with the run since")
        return 0
    tell(f"{'nobody writes it: ' if writer is None else ''}{watch.ending().message}")
    return 0 if writer is None or watch.ending().went_well else 1
