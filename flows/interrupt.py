"""Signals that stop a training run, which `metaloom resume` can continue.

Ctrl-C finishes and commits the current stage; pressed again, it stops immediately. After SIGTERM and SIGHUP, a
scheduler or terminal kills the process soon, so a stage that takes longer is abandoned.
"""

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.text import Text

from metaloom.flows.errors import EXIT_INTERRUPTED
from metaloom.flows.rollouts.guard import note_requested_end

STAGE_SECONDS = 10.0
"""Time for the current stage after SIGTERM or SIGHUP: Slurm kills after 30 s, Docker after 10 by default."""
_CLOSING_SECONDS = 6.0
_LOOK_EVERY_SECONDS = 0.2
_SHOW_CURSOR = "\x1b[?25h"


class StageAbandoned(KeyboardInterrupt):
    """Raised in a stage that takes too long after a request to end."""


_can_be_abandoned = False


@contextmanager
def abandonable() -> Generator[None, None, None]:
    """Allow `StageAbandoned` in the block, which must have no side effects."""
    global _can_be_abandoned
    _can_be_abandoned = True
    try:
        yield
    finally:
        _can_be_abandoned = False


@dataclass
class Stop:
    """A stop request. Calling it returns True after a request. A live panel shows it.

    Attributes:
        how: Effect on the current stage, in words; empty before a request.
        panel: Console of the live panel; nothing else may write while it is shown.
    """

    how: str = ""
    panel: Console | None = None

    def __call__(self) -> bool:
        """Return True if this process must stop."""
        return bool(self.how)

    def __rich__(self) -> RenderableType:
        """Render the request, or nothing."""
        return Text(f"stopping after this stage; {self.how}", "bold") if self.how else Group()

    @contextmanager
    def drawn_in(self, panel: Console) -> Generator[None, None, None]:
        """Show requests in a live panel during the block."""
        self.panel = panel
        try:
            yield
        finally:
            self.panel = None

    def end_at_once(self, again: str) -> None:
        """End the process immediately. Committed outputs are kept; the rest will be recomputed."""
        note_requested_end()
        text = f"\nstopped at once; {again}\n"
        with suppress(OSError):  # the terminal may be gone
            out = 2
            if self.panel is not None:
                self.panel.quiet = True  # its thread would overwrite the text
                out, text = self.panel.file.fileno(), _SHOW_CURSOR + text
            if select.select([], [out], [], 0)[1]:  # a blocked terminal must not delay the end
                os.write(out, text.encode())
        os._exit(EXIT_INTERRUPTED)


@contextmanager
def stop_on_interrupt(again: Callable[[], str]) -> Iterator[Stop]:
    """Yield a `Stop` that reacts to signals.

    Args:
        again: Function that returns advice on how to continue, for an immediate end.
    """
    stop, lock = Stop(), threading.RLock()
    asking = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        asking.remove(signal.SIGHUP)
    # An uninterruptible call, such as of a simulator, must not delay the end either.
    end = threading.Timer(STAGE_SECONDS + _CLOSING_SECONDS, lambda: stop.end_at_once(again()))
    end.daemon = True

    def receive(number: int, received: list[int]) -> None:
        """Handle a signal, called by the listening thread, or by the handler if the thread was replaced."""
        with lock:
            received.append(number)
            if number == signal.SIGINT and len(received) > 1:
                stop.end_at_once(again())
            if number != signal.SIGINT and end.ident is None:
                signal.setitimer(signal.ITIMER_REAL, STAGE_SECONDS, _LOOK_EVERY_SECONDS)
                end.start()
            if stop.how:
                return
            stop.how = "press Ctrl-C again to stop at once"
            if number != signal.SIGINT:
                stop.how = f"after {STAGE_SECONDS:g} s it is abandoned, and computed again by `metaloom resume`"
            if stop.panel is None:
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, f"\nfinishing the current stage; {stop.how}\n".encode())

    def abandon(number: int, frame: FrameType | None) -> None:
        del number, frame
        if _can_be_abandoned:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise StageAbandoned

    handled, heard = list[int](), list[int]()
    handlers = dict.fromkeys(asking, lambda number, frame: receive(number, handled)) | {signal.SIGALRM: abandon}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with _listening(lambda number: receive(number, heard) if number in asking else None):
            yield stop
    finally:
        for number in asking:
            signal.signal(number, previous[number])
        end.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous[signal.SIGALRM])


@contextmanager
def _listening(receive: Callable[[int], None]) -> Iterator[None]:
    """Forward signals from a thread, since handlers wait while the main thread is in a long call."""
    listener, ours = socket.socketpair()
    ours.setblocking(False)

    def listen() -> None:
        while numbers := listener.recv(64):
            for number in numbers:
                receive(number)

    thread = threading.Thread(target=listen, name="metaloom-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        thread.join()
        listener.close()


# Ignore signals to forked copies of this process, which a simulator may have made.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
