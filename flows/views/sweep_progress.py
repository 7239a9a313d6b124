"""Progress of a sweep: bars in a terminal, else a line or JSON object for every run that begins and ends."""

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from metaloom.flows.formatting import adaptation_returns, duration, number
from metaloom.flows.interrupt import Stop
from metaloom.flows.observer import IterationReport
from metaloom.flows.results.sweep import Outcome, SweepObserver
from metaloom.flows.sweeps.stored import PlannedRun
from metaloom.flows.views.progress import ProgressMode, is_live, returns_text
from metaloom.pipeline.shown import printable


@contextmanager
def sweep_progress(
    num_runs: int, num_done: int, mode: ProgressMode = "auto", *, stop: Stop | None = None, out: TextIO | None = None
) -> Generator[SweepObserver, None, None]:
    """Yield a SweepObserver that reports to `out`, standard output when None, while the context lasts."""
    stream, stop = sys.stdout if out is None else out, stop or Stop()
    console = Console(file=stream, highlight=False)
    if mode == "auto" and is_live(console):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        bars = Progress(*columns, TextColumn("{task.fields[told]}", markup=False), console=console)
        with stop.drawn_in(console), Live(Group(bars, stop), console=console, refresh_per_second=10):
            shown = _Bars(bars, num_runs, num_done)
            yield SweepObserver(shown.begun, shown.iteration_done, shown.ended, stop)
        return
    lines = _Lines(stream, num_runs, num_done, as_json=mode == "json")
    yield SweepObserver(lines.begun, lines.iteration_done, lines.ended, stop)


class _Lines:
    """Lines of text or JSON."""

    def __init__(self, stream: TextIO, num_runs: int, num_done: int, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json
        self._num_runs, self._ended = num_runs, num_done
        self._began: dict[str, float] = {}
        self._reports: dict[str, IterationReport] = {}

    def begun(self, run: PlannedRun) -> None:
        """Report that work on a run begins."""
        self._began[run.name] = time.monotonic()
        self._write({"run": run.name, "state": "training"}, f"{run.name}  begins")

    def iteration_done(self, run: PlannedRun, report: IterationReport) -> None:
        """Remember the newest iteration."""
        self._reports[run.name] = report

    def ended(self, outcome: Outcome) -> None:
        """Report how a run ended, and the number of ended runs."""
        name, report = outcome.run.name, self._reports.get(outcome.run.name)
        self._ended += outcome.ending == "complete"
        seconds = time.monotonic() - self._began[name]
        words = [f"{name}  {outcome.ending}", duration(seconds), f"{self._ended} of {self._num_runs} complete"]
        if report is not None and adaptation_returns(report.metrics):
            words.insert(1, returns_text(report, "return ").plain)
        if outcome.message:
            words.append(outcome.message)
        found = {"run": name, "state": outcome.ending, "seconds": seconds, "message": outcome.message}
        self._write(found, "  ".join(words))

    def _write(self, found: dict[str, Any], line: str) -> None:
        text = json.dumps(found) if self._as_json else printable(line).replace("\N{MINUS SIGN}", "-")
        self._stream.write(text + "\n")
        self._stream.flush()


class _Bars:
    """A bar for the sweep, and one for each run that trains."""

    def __init__(self, bars: Progress, num_runs: int, num_done: int) -> None:
        self._bars = bars
        self._all = bars.add_task("runs", total=num_runs, completed=num_done, told="")
        self._tasks: dict[str, TaskID] = {}

    def begun(self, run: PlannedRun) -> None:
        """Show a bar for a run."""
        self._tasks[run.name] = self._bars.add_task(printable(run.name), total=None, told="")

    def iteration_done(self, run: PlannedRun, report: IterationReport) -> None:
        """Move its bar."""
        returns = adaptation_returns(report.metrics)
        told = f"return {number(returns[-1])}" if returns else ""
        task = self._tasks[run.name]
        self._bars.update(task, total=report.iterations, completed=report.iteration + 1, told=told)

    def ended(self, outcome: Outcome) -> None:
        """Take its bar away."""
        self._bars.remove_task(self._tasks.pop(outcome.run.name))
        if outcome.ending == "complete":
            self._bars.advance(self._all)
        if outcome.message:
            self._bars.console.out(printable(f"{outcome.run.name}  {outcome.ending}  {outcome.message}"))
