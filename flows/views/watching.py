"""Watching a run that another process trains, through its store, lock and log."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from metaloom import storage
from metaloom.flows.formatting import plural, seconds_of, size, stage_name
from metaloom.flows.observer import IterationReport
from metaloom.flows.run_log import LogLine, LogReader
from metaloom.flows.streams import data_stream
from metaloom.flows.views.parts import as_text
from metaloom.flows.views.progress import SPARKLINE_WIDTH, PlainLines, ProgressMode, TrainingPanel, is_live, json_line
from metaloom.flows.views.run_info import state_of
from metaloom.flows.views.stored_reports import StoredReports
from metaloom.storage import StageRef, argument

LOOK_SECONDS, REMOTE_LOOK_SECONDS, WEIGH_SECONDS = 0.5, 5.0, 10.0
"""Seconds between checks of a local run, of a run in object storage, and of file sizes."""
WARNINGS = 3


@dataclass(frozen=True)
class Ending:
    """State of a run that is no longer being written, with a message that describes it."""

    how: Literal["complete", "stopped", "failed", "killed"]
    message: str

    @property
    def went_well(self) -> bool:
        """True if the last writer ended without an error."""
        return self.how in ("complete", "stopped")


class Watch:
    """Follower of a run that another process writes."""

    def __init__(self, path: Path) -> None:
        self.run: storage.Run = storage.open_run(path)
        self.writer: storage.Writer | None = None  # process that is writing the run
        self.stage: tuple[StageRef, float] | None = None  # current stage and its start in seconds since 1970, if logged
        self.workers: str = ""  # description of the rollout backend, if logged
        self.warnings: deque[LogLine] = deque(maxlen=WARNINGS)  # newest warnings of the session
        self.num_bytes: int = 0  # size of the run's files when last measured
        self._error = ""
        self._log = LogReader(path)
        self._next = max(0, len(self.run.iterations) - SPARKLINE_WIDTH)
        self._reports = StoredReports(self.run)
        self._weighed = float("-inf")

    def look(self) -> list[IterationReport]:
        """Read new outputs; return reports of newly completed iterations, or of the last few in the first call."""
        if (remote := self.run.files.remote) is not None:
            remote.pull()
        # Check the writer first, so that its last outputs are read below if it has ended.
        self.writer = storage.current_writer(self.run.path, remote)
        for line in self._log.new_lines():
            if "workers" in line.fields:  # a session begins
                self.workers, self._error, self.stage = str(line.fields["workers"]), "", None
                self.warnings.clear()
            elif line.level == "debug" and line.ref is not None:
                self.stage = line.ref, seconds_of(line.time, 0.0)
            elif line.level == "error" and "ended_by" in line.fields:
                self._error = line.message
            elif line.is_at_least("warning"):
                self.warnings.append(line)
        if time.monotonic() - self._weighed >= WEIGH_SECONDS or self.writer is None:
            self.num_bytes, self._weighed = self.run.files.num_bytes(), time.monotonic()
        done = len(self.run.iterations)
        new, self._next = range(self._next, done), max(self._next, done)
        return [*map(self._reports.of, new)]

    def newest(self) -> StageRef | None:
        """Return the newest stored stage of the current iteration, or None if it has none yet."""
        refs = self.run.refs_of([len(self.run.iterations)])
        return max(refs, key=lambda ref: self.run.record(ref).sequence, default=None)

    def ending(self) -> Ending:
        """Return the state of the run after its writer has ended."""
        run, total = self.run, self.run.capacity
        how = f"{len(run.iterations)} of {plural(total, 'iteration')}"
        again = f"continue with: metaloom resume {argument(run.path)}"
        if state_of(run, None) == "complete":
            return Ending("complete", f"complete: {how}")
        if self._error:
            return Ending("failed", f"failed after {how}: {self._error}; {again}")
        if state_of(run, None) == "killed":
            return Ending("killed", f"its writer was killed after {how}; nothing stored is lost; {again}")
        return Ending("stopped", f"stopped after {how}; {again}")


class WatchPanel(TrainingPanel):
    """Live panel for a run that another process trains."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(time.time)
        self._watch = watch
        self.update([])

    def update(self, reports: Sequence[IterationReport]) -> None:
        """Update the panel with new reports and the current state."""
        for report in reports:
            self.iteration_done(report)
        watch, writer = self._watch, self._watch.writer
        self._began = seconds_of(writer.since, 0.0) if writer else None
        self._stage = watch.stage if writer and watch.stage and not watch.run.contains(watch.stage[0]) else None
        self._stored = watch.newest() if writer and self._stage is None else None

    def rows(self) -> Iterator[tuple[str, RenderableType]]:
        watch = self._watch
        yield "run", as_text(watch.run.location)
        yield from super().rows()
        if self._stored is not None:
            yield "stage", f"{stage_name(self._stored)} is stored"
        if watch.writer is not None:
            yield "writer", as_text(watch.writer)
            yield "workers", as_text(watch.workers or "unknown: the log is not here")
        yield "disk", size(watch.num_bytes)
        for line in watch.warnings:
            yield "warning", as_text(f"{line.time[11:19]} {line.message.splitlines()[0]}", "yellow")


def watch_run(path: Path, *, mode: ProgressMode, out: TextIO | None = None, wait: Callable[[float], None]) -> Ending:
    """Show a run until its training ends, as a live panel in a terminal, otherwise with a line per iteration."""
    watch, stream = Watch(path), data_stream() if out is None else out
    console = Console(file=stream, highlight=False)
    pause = LOOK_SECONDS if watch.run.files.remote is None else REMOTE_LOOK_SECONDS
    reports = watch.look()
    if mode == "auto" and is_live(console):
        panel = WatchPanel(watch)
        panel.update(reports)
        with Live(panel, console=console, refresh_per_second=4):
            while watch.writer is not None:
                wait(pause)
                panel.update(watch.look())
        return watch.ending()
    line = json_line if mode == "json" else PlainLines()
    texts = [line(report) for report in reports][-1:]
    while True:
        stream.writelines(f"{text}\n" for text in texts)
        stream.flush()
        if watch.writer is None:
            return watch.ending()
        wait(pause)
        texts = [line(report) for report in watch.look()]
