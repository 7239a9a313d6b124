"""Status of a command that runs for seconds: what it does and since when, on standard error unless it is a terminal.

Apart from `progress`, which needs NumPy: the status appears before anything is imported that takes long.
"""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

EVERY_SECONDS = 10.0


class Status:
    """The status of the running command; every method does nothing while none is shown."""

    def __init__(self) -> None:
        self._what = self._how_far = ""
        self._began = 0.0
        self._live: Live | None = None
        self._ended = threading.Event()

    @contextmanager
    def shown(self, what: str, console: Console) -> Generator[None]:
        """Show the current action: at once on a terminal, else as a line on standard error every 10 seconds."""
        self._what, self._how_far, self._began = what, "", time.monotonic()
        ended = self._ended = threading.Event()
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(self, console=console, transient=True, redirect_stderr=sys.stderr.isatty())
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._print_lines, args=(ended,), daemon=True).start()
        try:
            yield
        finally:
            ended.set()  # another thread may have shown a status since
            self.end()

    def far(self, how_far: str) -> None:
        """Show how far the command is."""
        self._how_far = how_far

    def counted(self, what: str) -> Callable[[int, int], None]:
        """Return what shows how many of all things are done, when it is called with both."""
        return lambda done, total: self.far(f"{done:,} of {total:,} {what}")

    def end(self) -> None:
        """Show no status any more: the command asks something, or shows its own progress."""
        self._ended.set()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    @property
    def console(self) -> Console | None:
        """The console whose last line is the status: what is printed by it stands above."""
        return None if self._live is None else self._live.console

    def __rich__(self) -> Text:
        """Draw the status as it stands now."""
        return Text(self._line(), "dim", no_wrap=True, overflow="ellipsis")

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return ", ".join(filter(None, [self._what, self._how_far, f"{seconds} s" if seconds else ""]))

    def _print_lines(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_SECONDS):
            sys.stderr.write(f"metaloom: {self._line()}\n")


STATUS = Status()
