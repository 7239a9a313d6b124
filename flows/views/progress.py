"""Progress of training: a line or JSON object per iteration, and a live panel in a terminal."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from metaloom.flows.formatting import (
    adaptation_returns,
    by_inner_step,
    count,
    duration,
    finite,
    number,
    plural,
    speed,
    stage_name,
    trial_returns,
)
from metaloom.flows.interrupt import Stop
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.results.class_returns import class_rows, classes_text
from metaloom.flows.results.sweep import RunOutcome, SweepObserver
from metaloom.flows.sweeps.stored import PlannedRun
from metaloom.pipeline.shown import printable
from metaloom.storage import StageRef

ProgressMode = Literal["auto", "plain", "json"]

SPARKLINE_WIDTH = 24  # enough for a trend, and still fits into 80 columns
SPARKS = "▁▂▃▄▅▆▇█"


@contextmanager
def progress(
    mode: ProgressMode = "auto", *, stop: Stop | None = None, out: TextIO | None = None
) -> Generator[Observer, None, None]:
    """Within the block, provide an Observer that reports to `out` (standard output if None).

    In a terminal, the mode `auto` shows a short line per iteration above a live panel; elsewhere, it is the same as
    `plain`, which writes a line per iteration. `json` writes a JSON object per line. `stop` is checked before every
    stage and shown in the panel.
    """
    stream, stop = sys.stdout if out is None else out, stop or Stop()
    console = _PanelConsole(file=stream, highlight=False)
    if mode == "auto" and is_live(console):
        panel = TrainingPanel()
        # Standard error is drawn above the panel only if it is a terminal.
        live = Live(Group(panel, stop), console=console, refresh_per_second=4, redirect_stderr=sys.stderr.isatty())

        def show_iteration(report: IterationReport) -> None:
            console.print(iteration_text(report))  # above the panel
            panel.iteration_done(report)

        with stop.drawn_in(console), live:
            yield Observer(panel.stage_started, show_iteration, stop)
        return
    line = json_line if mode == "json" else PlainLines()

    def iteration_done(report: IterationReport) -> None:
        stream.write(line(report) + "\n")
        stream.flush()

    yield Observer(iteration_done=iteration_done, should_stop=stop)


class _PanelConsole(Console):
    """Console that ignores a closed terminal, which would end rich's thread or the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def is_live(console: Console) -> bool:
    """Return True if a console can show a live panel."""
    return console.is_terminal and not console.is_dumb_terminal


@dataclass
class Pace:
    """Estimator of the seconds per iteration and the remaining time.

    It uses the median of recent iterations, since the first one includes setup and times vary.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    last_elapsed: float = 0.0

    def add(self, report: IterationReport) -> None:
        self.recent.append(report.elapsed_seconds - self.last_elapsed)
        self.last_elapsed = report.elapsed_seconds

    @property
    def seconds_per_iteration(self) -> float:
        """Median duration of recent iterations in seconds."""
        return median(self.recent)

    def seconds_left(self, report: IterationReport) -> float:
        """Return the estimated time until the end of the run in seconds."""
        return self.seconds_per_iteration * (report.iterations - report.iteration - 1)


class TrainingPanel:
    """Live panel that rich renders repeatedly while training runs in another thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, Pace()
        self._began: float | None = clock()
        self._stage: tuple[StageRef, float] | None = None
        self._report: IterationReport | None = None
        self._after: deque[float] = deque(maxlen=SPARKLINE_WIDTH)
        self._evaluation = ""

    def stage_started(self, ref: StageRef) -> None:
        self._stage = (ref, self._clock())

    def iteration_done(self, report: IterationReport) -> None:
        """Show the returns and speed of a completed iteration."""
        self._pace.add(report)
        self._report = report
        if report.evaluation_returns:
            updates = plural(report.iteration + 1, "update")
            self._evaluation = f"{_evaluation_text(report.evaluation_returns)}   after {updates}"
        returns = adaptation_returns(report.metrics)
        if returns and math.isfinite(returns[-1]):
            self._after.append(returns[-1])

    def __rich__(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", min_width=9)
        grid.add_column()
        for row in self.rows():
            grid.add_row(*row)
        return grid

    def rows(self) -> Iterator[tuple[str, RenderableType]]:
        """Yield the name and content of each row in the panel."""
        stage, report = self._stage, self._report
        if report is None:
            yield "iteration", f"{stage[0].iteration} under way" if stage else "starting"
        else:
            done, total = report.iteration + 1, report.iterations
            row = Table.grid(padding=(0, 2))
            row.add_row(f"{done} of {total} done", ProgressBar(total, done, width=30), f"{100 * done / total:.0f}%")
            yield "iteration", row
        if stage is not None and not _finished(report):
            yield "stage", f"{stage_name(stage[0])}  {self._clock() - stage[1]:.1f} s"
        if report is not None:
            yield "return", Text("   ").join([returns_text(report), Text(sparkline(self._after), "cyan")])
            if report.class_returns:
                yield "by class", classes_text(report.class_returns)
            if self._evaluation:
                yield "evaluation", self._evaluation
            pace = f"{speed(report.steps_per_second)}   {self._pace.seconds_per_iteration:.2f} s per iteration"
            taken = report.metrics.get("env_steps")
            yield "speed", pace if taken is None else f"{pace}   {count(taken)} env steps so far"
        if self._began is not None:
            elapsed = f"{duration(self._clock() - self._began)} elapsed"
            if report is not None and not _finished(report):
                elapsed += f"   {duration(self._pace.seconds_left(report))} left"
            yield "time", elapsed


class PlainLines:
    """Callable that formats each iteration as a line of text with the estimated remaining time."""

    def __init__(self) -> None:
        self._pace = Pace()

    def __call__(self, report: IterationReport) -> str:
        self._pace.add(report)
        parts = [iteration_text(report).plain]
        parts += [f"by class: {classes_text(report.class_returns)}"] if report.class_returns else []
        parts += [speed(report.steps_per_second), f"{self._pace.recent[-1]:.2f} s"]
        if report.evaluation_returns:
            parts.append(f"evaluation {_evaluation_text(report.evaluation_returns)}")
        if not _finished(report):
            parts.append(f"{duration(self._pace.seconds_left(report))} left")
        return "  ".join(parts).replace("\N{MINUS SIGN}", "-").replace("\N{PLUS-MINUS SIGN}", "+-")


def sparkline(values: "deque[float]") -> str:
    """Return a string of bars with eight heights, one per value; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def json_line(report: IterationReport) -> str:
    """Format an iteration as a JSON object on one line."""
    return json.dumps(
        {
            **asdict(report),
            "metrics": {name: finite(value) for name, value in report.metrics.items()},
            "class_returns": class_rows(report.class_returns),
            "evaluation_returns": [finite(value) for value in report.evaluation_returns],
            "task_returns": [[finite(value) for value in returns.tolist()] for returns in report.task_returns],
        },
        allow_nan=False,
    )


def iteration_text(report: IterationReport) -> Text:
    """Format an iteration and its returns, within 80 columns."""
    counted = f"iteration {report.iteration} ({report.iteration + 1} of {report.iterations})  "
    return Text.assemble(counted, returns_text(report, "return "))


def returns_text(report: IterationReport, prefix: str = "") -> Text:
    """Format the returns before and after adaptation, with trial returns and success rates if available."""
    returns = adaptation_returns(report.metrics)
    if not returns:
        return Text(f"{prefix}unknown")
    before = "" if len(returns) == 1 else f"before {number(returns[0])}  after "
    success = " to ".join(map(number, by_inner_step(report.metrics, "success_rate")))
    rate = f"  success rate {success}" if success else ""
    ends = [*map(number, trial_returns(report.metrics))]
    trial = f" (first episode {ends[0]}, last {ends[1]})" if ends else ""
    return Text.assemble(prefix, before, (number(returns[-1]), "bold"), trial, rate)


def _evaluation_text(returns: Sequence[float]) -> str:
    return "  ".join(f"{k}: {number(value)}" for k, value in enumerate(returns))


def _finished(report: IterationReport | None) -> bool:
    return report is not None and report.iteration + 1 >= report.iterations


@contextmanager
def sweep_progress(
    num_runs: int, num_done: int, mode: ProgressMode = "auto", *, stop: Stop | None = None, out: TextIO | None = None
) -> Generator[SweepObserver, None, None]:
    """Within the block, provide a SweepObserver that reports to `out` (standard output if None)."""
    stream, stop = sys.stdout if out is None else out, stop or Stop()
    console = Console(file=stream, highlight=False)
    if mode == "auto" and is_live(console):
        name, last = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[last]"))
        bars = Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last, console=console)
        with stop.drawn_in(console), Live(Group(bars, stop), console=console, refresh_per_second=10):
            shown = _Bars(bars, num_runs, num_done)
            yield SweepObserver(shown.begun, shown.iteration_done, shown.ended, stop)
        return
    lines = _Lines(stream, num_runs, num_done, as_json=mode == "json")
    yield SweepObserver(lines.begun, lines.iteration_done, lines.ended, stop)


class _Lines:
    """Reporter of the runs in a sweep as lines of text or JSON."""

    def __init__(self, stream: TextIO, num_runs: int, num_done: int, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json
        self._num_runs, self._ended = num_runs, num_done
        self._began: dict[str, float] = {}
        self._reports: dict[str, IterationReport] = {}

    def begun(self, run: PlannedRun) -> None:
        self._began[run.name] = time.monotonic()
        self._write({"run": run.name, "state": "training"}, f"{run.name}  begins")

    def iteration_done(self, run: PlannedRun, report: IterationReport) -> None:
        self._reports[run.name] = report

    def ended(self, outcome: RunOutcome) -> None:
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
    """Progress bars for the sweep and for each run in training."""

    def __init__(self, bars: Progress, num_runs: int, num_done: int) -> None:
        self._bars = bars
        self._all = bars.add_task("runs", total=num_runs, completed=num_done, last="")
        self._tasks: dict[str, TaskID] = {}

    def begun(self, run: PlannedRun) -> None:
        self._tasks[run.name] = self._bars.add_task(printable(run.name), total=None, last="")

    def iteration_done(self, run: PlannedRun, report: IterationReport) -> None:
        returns = adaptation_returns(report.metrics)
        last = f"return {number(returns[-1])}" if returns else ""
        task = self._tasks[run.name]
        self._bars.update(task, total=report.iterations, completed=report.iteration + 1, last=last)

    def ended(self, outcome: RunOutcome) -> None:
        self._bars.remove_task(self._tasks.pop(outcome.run.name))
        if outcome.ending == "complete":
            self._bars.advance(self._all)
        if outcome.message:
            self._bars.console.out(printable(f"{outcome.run.name}  {outcome.ending}  {outcome.message}"))
