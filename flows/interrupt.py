"""Signals that stop a training run, which `metaloom resume` can continue.

After Ctrl-C, the current stage is finished and committed; a second Ctrl-C stops the run immediately. After SIGTERM or
SIGHUP, a scheduler or terminal soon kills the process, so a stage that takes too long is abandoned.
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
"""Time limit for the current stage after SIGTERM or SIGHUP. By default, Slurm kills a job 30 s later, Docker 10 s."""
_CLOSING_SECONDS = 6.0
_LOOK_EVERY_SECONDS = 0.2
_SHOW_CURSOR = "\x1b[?25h"


class StageAbandoned(KeyboardInterrupt):
    """Raised in a stage that takes too long after SIGTERM or SIGHUP."""


_can_be_abandoned = False


@contextmanager
def abandonable() -> Generator[None, None, None]:
    """Allow `StageAbandoned` to be raised in the block, which must have no side effects."""
    global _can_be_abandoned
    _can_be_abandoned = True
    try:
        yield
    finally:
        _can_be_abandoned = False


@dataclass
class Stop:
    """State of a stop request. Calling it returns True after a request, and a live panel can render it."""

    how: str = ""  # what happens to the current stage, in words; empty before a request
    panel: Console | None = None  # console of the live panel; nothing else may write while the panel is shown

    def __call__(self) -> bool:
        return bool(self.how)

    def __rich__(self) -> RenderableType:
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
        """End the process immediately; committed outputs are kept, and others will be recomputed."""
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
    """Yield a `Stop` that reacts to signals; if it ends the process at once, it prints what `again` returns."""
    stop, lock = Stop(), threading.RLock()
    asking = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
        asking.remove(signal.SIGHUP)
    # An uninterruptible call, for example in a simulator, must not delay the end either.
    end = threading.Timer(STAGE_SECONDS + _CLOSING_SECONDS, lambda: stop.end_at_once(again()))
    end.daemon = True

    def receive(number: int, received: list[int]) -> None:
        """Handle a signal. Called by the listening thread, or by the signal handler if the thread was replaced."""
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
    """Call `receive` for each signal in a thread, since Python's handlers wait for the main thread's current call."""
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


# Ignore signals to forked copies of this process, which a simulator may have created.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
