"""Signals that reach all processes of a terminal or a service, of which the one that the user started decides."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def kept_from_children(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread, and so in the processes that it starts meanwhile and in all that they start.

    None is lost: what comes meanwhile is delivered to this process at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        _start_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # its start unblocks SIGINT and SIGTERM
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start Python's tracker of semaphores, without which no lock can be made, with the blocked signals blocked.

    It cleans up without a warning after a process that ended at once.
    """
    options = [*sys.warnoptions]
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = options
