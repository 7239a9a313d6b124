"""Status line for commands that take several seconds.

Separate from `progress`, which imports NumPy, because the status must appear before slow imports.
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
    """Status of the running command; its methods do nothing if no status is shown."""

    def __init__(self) -> None:
        self._what = self._how_far = ""
        self._began = 0.0
        self._live: Live | None = None
        self._ended = threading.Event()

    @contextmanager
    def shown(self, what: str, console: Console) -> Generator[None]:
        """Within the block, show a status: live on a terminal, else as a line on standard error every 10 seconds."""
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
            ended.set()  # another thread may have shown a status in the meantime
            self.end()

    def far(self, how_far: str) -> None:
        """Show how far the command has progressed."""
        self._how_far = how_far

    def counted(self, what: str) -> Callable[[int, int], None]:
        """Return a progress callback that shows how many of the items are done."""
        return lambda done, total: self.far(f"{done:,} of {total:,} {what}")

    def end(self) -> None:
        """Remove the status, as required before a question or other output."""
        self._ended.set()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    @property
    def console(self) -> Console | None:
        """Console that prints above the live status line; None if there is none."""
        return None if self._live is None else self._live.console

    def __rich__(self) -> Text:
        return Text(self._line(), "dim", no_wrap=True, overflow="ellipsis")

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return ", ".join(filter(None, [self._what, self._how_far, f"{seconds} s" if seconds else ""]))

    def _print_lines(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_SECONDS):
            sys.stderr.write(f"metaloom: {self._line()}\n")


STATUS = Status()
