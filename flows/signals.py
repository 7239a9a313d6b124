"""Signals to all processes of a terminal or service, which only the main process should handle."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def kept_from_children(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread during the block, and in all processes started from it.

    Signals received meanwhile are delivered to this process at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        _start_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # starting it unblocks SIGINT and SIGTERM
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start Python's semaphore tracker, which locks need, with signals blocked.

    It cleans up without a warning after a process that exited immediately.
    """
    options = [*sys.warnoptions]
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = options
