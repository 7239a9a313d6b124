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
    resource_tracker.ensure_running()  # whose start unblocks some, so that it has to happen before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
