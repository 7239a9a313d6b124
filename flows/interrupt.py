"""Signals that end a training with all that is committed in place; `metaloom resume` continues it.

Ctrl-C finishes and commits the current stage, and stops at once when it is pressed again. SIGTERM and SIGHUP come from
a scheduler or a terminal that kills the process soon afterwards, so a stage that takes longer is abandoned.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_INTERRUPTED = 130
STAGE_SECONDS = 10.0
"""Time for the current stage after SIGTERM or SIGHUP: Slurm kills after 30 s, Docker after 10 by default."""
_CLOSING_SECONDS = 6.0
_LOOK_EVERY_SECONDS = 0.2


class StageAbandoned(KeyboardInterrupt):
    """The current stage would take too long for a process that has been told to end."""


_can_be_abandoned = False


@contextmanager
def abandonable() -> Generator[None, None, None]:
    """Let `StageAbandoned` be raised in the block: it changes nothing that outlives it."""
    global _can_be_abandoned
    _can_be_abandoned = True
    try:
        yield
    finally:
        _can_be_abandoned = False


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has asked this process to stop."""
    received: list[int] = []
    # What cannot be interrupted, such as a call of a simulator, does not keep the process either.
    end = threading.Timer(STAGE_SECONDS + _CLOSING_SECONDS, os._exit, (EXIT_INTERRUPTED,))
    end.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and received:
            # Nothing to tidy: what is committed is committed, the rest is invisible and will be computed again.
            os._exit(EXIT_INTERRUPTED)
        if number != signal.SIGINT and {*received} <= {signal.SIGINT}:
            signal.setitimer(signal.ITIMER_REAL, STAGE_SECONDS, _LOOK_EVERY_SECONDS)
            end.start()
        if not received:
            how = "press Ctrl-C again to stop at once"
            if number != signal.SIGINT:
                how = f"after {STAGE_SECONDS:g} s it is abandoned, and computed again by `metaloom resume`"
            with suppress(OSError):  # the terminal may be what has gone
                os.write(2, f"\nfinishing the current stage; {how}\n".encode())
        received.append(number)

    def abandon(number: int, frame: FrameType | None) -> None:
        del number, frame
        if _can_be_abandoned:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise StageAbandoned

    handlers = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGHUP: handle, signal.SIGALRM: abandon}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        del handlers[signal.SIGHUP]
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield lambda: bool(received)
    finally:
        end.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
