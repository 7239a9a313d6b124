"""Report of a run: the learning curve as an image, and a page of charts and settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_label, count, dotted, duration, number, plural, size
from metaloom.flows.results.class_returns import headline_returns, named_estimates, plus_minus
from metaloom.flows.runs import require_settings
from metaloom.flows.views import charts
from metaloom.flows.views.history import STEPS, RunHistory, load_history, stage_seconds
from metaloom.flows.views.page import Figure, Page, Picture, plotly_file
from metaloom.flows.views.run_charts import learning_chart, run_charts
from metaloom.flows.views.series import Chart
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageRef
from metaloom.storage.progress import Progress, unseen

FigureFormat = Literal["svg", "pdf"]
CLASS_TABLE = "Returns of the last iteration by class of task, ± standard error over tasks"
ABOUT_ENV = ("components", "task_classes")  # names of the recorded facts that describe the environment


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files in a report."""

    png: Path
    html: Path
    figures: tuple[Path, ...] = ()

    def __str__(self) -> str:
        lines = [f"learning curve  {self.png}", f"report page     {self.html}"]
        if self.figures:
            names = ", ".join(file.name for file in self.figures)
            lines.append(f"{len(self.figures)} figures      {self.figures[0].parent}: {names}")
        return "\n".join(lines)


def write_report(
    run: Run, out: Path, *, static: bool = False, film: Picture | None = None, on_progress: Progress = unseen
) -> ReportFiles:
    """Write learning_curve.png and report.html to a folder, which is created if needed, and return their paths."""
    require_settings(run)
    # Progress counts one table of episodes per iteration, and one record per stage.
    tables, records = len(run.iterations), len(run.refs())
    history = load_history(run, on_progress=lambda done, _: on_progress(done, tables + records))
    seconds = stage_seconds(run, len(history.iterations), lambda done, _: on_progress(tables + done, tables + records))
    page = report_page(run, history, seconds, static=static, film=film).html()
    out.mkdir(parents=True, exist_ok=True)
    files = ReportFiles(out / "learning_curve.png", out / "report.html")
    files.png.write_bytes(charts.rendered(learning_curve(run.path.name, history), "png"))
    files.html.write_text(page, encoding="utf-8")
    return files


def write_figures(run: Run, out: Path, kind: FigureFormat) -> list[Path]:
    """Write each chart of a run to a folder as NAME.svg or NAME.pdf, and return the paths."""
    require_settings(run)
    files = {out / f"{chart.name}.{kind}": charts.draw(chart) for chart in run_charts(run, load_history(run))}
    out.mkdir(parents=True, exist_ok=True)
    for file, figure in files.items():
        file.write_bytes(charts.rendered(figure, kind))
    return [*files]


def learning_curve(name: str, history: RunHistory) -> charts.Drawing:
    """Plot the average returns before and after adaptation over training."""
    return charts.draw(learning_chart(name, history))


def report_page(
    run: Run,
    history: RunHistory,
    seconds: Mapping[StageRef, Array] | None = None,
    *,
    static: bool = False,
    film: Picture | None = None,
) -> Page:
    """Return the report page of a run; the other arguments are as in `run_charts` and `write_report`."""
    seconds = stage_seconds(run, len(history.iterations)) if seconds is None else seconds
    shown = run_charts(run, history, seconds)

    def figure(chart: Chart) -> Figure:
        if not static:
            return chart
        source = charts.svg_data_uri(charts.draw(chart, titled_elsewhere=True))
        alternative = chart.title if chart.kind == "bars" else f"{chart.title}, against {chart.x_label}"
        return Picture(source, alternative, chart.note)

    sections: dict[str, list[Figure]] = {}
    for chart in shown[1:]:
        sections.setdefault(chart.section, []).append(figure(chart))
    if film is not None:
        sections["Film"] = [film]
    info, facts = run.info, run.info["environment"]
    about_env = {"env": run.config["env"], **{name: facts[name] for name in ABOUT_ENV if facts.get(name)}}
    others = {name: fact for name, fact in facts.items() if name not in ABOUT_ENV}
    # Show each fact only once, even if several sources recorded it.
    made = {"created": info["created"], "configuration digest": info["config_digest"]} | info["versions"] | others
    return Page(
        title=run.path.name,
        subtitle=_subtitle(run),
        tiles=_tiles(run, history, seconds),
        main_figure=figure(shown[0]),
        sections=[*sections.items()],
        tables={
            **_class_table(history),
            "Configuration": list(dotted(run.config)),
            "Environment": list(dotted(about_env)),
            f"Metrics of iteration {history.iterations[-1]}": [
                (name, number(float(values[-1]))) for name, values in history.metrics.items()
            ],
            "Versions and machine": list(dotted(made | info["system"])),
        },
        unfolded=["Configuration", CLASS_TABLE],
        plotly="" if static else plotly_file().read_text(encoding="utf-8"),
    )


def _subtitle(run: Run) -> str:
    config, parent = run.config, run.info.get("parent")
    subtitle = f"{config['algorithm']['name']} on {config['env']['name']}, seed {config['seed']}"
    if parent is None:
        return subtitle
    # Curves include the parent's iterations; the settings below apply to the later part.
    shared = parent["iteration"]
    return f"{subtitle}, forked from {parent['name']}@{shared}: settings as below from iteration {shared} on"


def _class_table(history: RunHistory) -> dict[str, list[tuple[str, str]]]:
    if not history.by_class:
        return {}
    before, after = named_estimates(history.by_class[-1][0]), named_estimates(history.by_class[-1][-1])
    rows: list[tuple[str, str]] = []
    for (name, num_tasks, first), (_, _, last) in zip(before, after, strict=True):
        change = f"{plus_minus(first)} → " if history.last_step else ""
        rows.append((f"{name} ({plural(num_tasks, 'task')})", f"{change}{plus_minus(last)}"))
    return {CLASS_TABLE: rows}


def _tiles(run: Run, history: RunHistory, stage_seconds: Mapping[StageRef, Array]) -> list[tuple[str, str]]:
    drawn = history.task_returns[-1].mean(axis=1).tolist()
    returns, statistic = headline_returns(drawn, history.by_class[-1] if history.by_class else ())
    compute = sum(float(np.nansum(seconds)) for seconds in stage_seconds.values())
    last = history.last_step
    labels = {k: f"last return {adaptation_label(k, last)}" if last else "last return" for k in (0, last)}
    return [
        ("iterations done", f"{len(history.iterations):,} of {run.capacity:,}"),
        *([] if history.env_steps is None else [(STEPS, count(float(history.env_steps[-1])))]),
        *((f"{label}, {statistic}", number(returns[k])) for k, label in labels.items()),
        ("computing time (h:mm:ss)", duration(compute)),
        ("on disk", size(run.files.num_bytes())),
    ]


class Plots:
    """Charts of `metaloom report` as matplotlib figures, which notebooks display.

    Each chart has a method of the same name, such as `learning_curve()`. If the run does not have the chart, it raises
    a UsageError that lists the available charts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"Plots({self._run.location}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """Return the names of the charts that are available for the run."""
        return [*self._charts()] if self._run.iterations else []

    def draw(self, name: str) -> charts.Drawing:
        """Plot the chart with this name."""
        known = self._charts()
        if name not in known:
            raise UsageError(f"{self._run.location}: no chart {name!r}; choose one of {', '.join(known)}")
        return charts.draw(known[name])

    def __getattr__(self, name: str) -> Callable[[], charts.Drawing]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self.draw, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names()]

    def _charts(self) -> dict[str, Chart]:
        return {chart.name: chart for chart in run_charts(self._run, load_history(self._run))}
