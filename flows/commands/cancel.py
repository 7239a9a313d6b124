"""Ask the writer of a run to stop, without a signal: it looks for the request itself, before every stage.

So no process is touched that is not the writer, whatever number it has got, and any process that shares the folder can
ask.
"""

from collections.abc import Callable
from pathlib import Path

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.storage import Writer
from metaloom.storage.errors import system_errors

LOOK_SECONDS = 0.2


def ask_to_stop(path: Path) -> Writer | None:
    """Ask the process that writes a run to finish its stage and stop; returns which, None where nobody writes it.

    Raises:
        UsageError: it cannot be reached from here.
        storage.StorageFailed: the run's folder cannot be written.
    """
    run = storage.open_run(path)
    writer = storage.current_writer(path, run.files.remote)
    if writer is None:
        return None
    if storage.url_of(path) and not writer.is_here:
        raise UsageError(
            f"{run.location} is written by {writer}; required one on this machine, or a shared folder: nothing that "
            f"is put under a URL reaches it. Run `metaloom cancel {storage.argument(run.path)}` on {writer.host}"
        )
    if not writer.listens:
        raise UsageError(
            f"{run.location} is written by {writer}, of a version that takes no requests; required one that does. "
            f"`kill -INT {writer.pid}` on {writer.host} stops it as Ctrl-C does"
        )
    with system_errors(
        path,
        required="a folder to leave the request in",
        action=f"Free space, or check its permissions; or `kill -INT {writer.pid}` on {writer.host}",
    ):
        storage.ask_to_stop(path, writer.token)
    return writer


def wait_for_end(path: Path, writer: Writer, *, wait: Callable[[float], None]) -> None:
    """Return when a writer has let go of the run, or is dead."""
    while (now := storage.current_writer(path)) is not None and now.token == writer.token:
        wait(LOOK_SECONDS)


def withdraw(path: Path, writer: Writer) -> None:
    """Take the request back, which its writer has heard or has not lived to hear."""
    storage.withdraw(path, writer.token)
