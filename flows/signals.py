"""Signals that reach all processes of a terminal or a service, of which the one that the user started decides."""

import signal
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
        # It has no handler of SIGHUP, and no lock can be made while it is gone. Its start unblocks SIGINT and SIGTERM.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
