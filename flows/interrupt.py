"""Ctrl-C: once finishes and commits the current stage, twice stops at once. Both leave a run that can be resumed."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C (or SIGTERM) was received."""
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        del number, frame
        received += 1
        if received > 1:
            # Nothing to tidy: what is committed is committed, the rest is invisible and will be computed again.
            os._exit(EXIT_INTERRUPTED)
        sys.stderr.write("\nfinishing the current stage; press Ctrl-C again to stop at once\n")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received > 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
