"""Signals that are sent to all processes of a terminal or service, but that only the main process should handle."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def kept_from_children(*numbers: signal.Signals) -> Iterator[None]:
    """During the block, mask signals in this thread and in all processes that it starts.

    Signals that arrive in the meantime are delivered to this process at the end.
    """
    before, options = signal.pthread_sigmask(signal.SIG_BLOCK, numbers), [*sys.warnoptions]
    try:
        # Locks need Python's resource tracker, which must start while signals are blocked. Its warning about semaphores
        # that a killed process leaves behind is turned off.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        try:
            resource_tracker.ensure_running()
        finally:
            sys.warnoptions[:] = options
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # starting the tracker unblocks SIGINT and SIGTERM
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
