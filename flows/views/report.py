"""A run as a picture and a page: learning curve, divergences, entropy, timing by stage, configuration."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from metaloom.flows.errors import UsageError
from metaloom.flows.runs import require_settings
from metaloom.flows.views import charts
from metaloom.flows.views.charts import CLASS_NOTE, ERROR_BAND, Series, estimates_series
from metaloom.flows.views.class_returns import ByStep, classes_of, named_estimates, plus_minus, returns_by_class
from metaloom.flows.views.evaluation_plots import (
    per_shot_curve,
    stored_evaluations,
    training_curve,
    training_curve_by_class,
)
from metaloom.flows.views.formatting import (
    adaptation_label,
    count,
    dotted,
    duration,
    number,
    plural,
    short_time,
    size,
    stage_name,
)
from metaloom.flows.views.page import Page, Picture
from metaloom.flows.views.run_info import planned_iterations
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageRef, StageTable

BAND_NOTE = "line: mean over episodes; band: middle half (25–75 %) of the tasks' means"
BAND = "middle half of the tasks"
BALANCED_NOTE = (
    "line: mean of the means of all classes of tasks, which count alike; band: ± 1 standard error over tasks"
)
CLASS_TABLE = "Returns of the last iteration by class of task, ± standard error over tasks"


@dataclass(frozen=True)
class ReportFiles:
    """Files of a report."""

    png: Path
    html: Path


@dataclass(frozen=True)
class History:
    """Everything that a report shows of a run, one row per complete iteration.

    Attributes:
        iterations: [I] their numbers.
        metrics: name -> [I] float64; NaN where an iteration has no such metric.
        task_returns: [I, K+1, B] mean episode return by inner step and task.
        stage_seconds: output -> [I] wall seconds of its stage, in the order in which stages run; of iteration 0.
        stages: of the run.
        num_bytes: stored bytes of these iterations, as recorded.
        by_class: [I] returns by class of task, of every inner step; empty where the environment has no classes.
        classes: that it has.
    """

    iterations: Array
    metrics: Mapping[str, Array]
    task_returns: Array
    stage_seconds: Mapping[StageRef, Array]
    stages: StageTable
    num_bytes: int
    by_class: Sequence[ByStep] = ()
    classes: Classes | None = None

    @property
    def env_steps(self) -> Array:
        """[I] environment steps taken up to the end of each iteration."""
        return self.metrics["env_steps"]

    @property
    def last_step(self) -> int:
        """The number of inner steps, K."""
        return self.task_returns.shape[1] - 1

    @property
    def every_class_drawn(self) -> bool:
        """True if every iteration has tasks of every class, so that their balanced mean is a curve without gaps."""
        return bool(self.by_class) and all(min(steps[0].num_tasks) > 0 for steps in self.by_class)


def write_report(run: Run, out: Path) -> ReportFiles:
    """Write learning_curve.png and report.html into a folder, which is made if need be.

    Raises:
        UsageError: the run has no complete iteration yet.
        IncompatibleFormat: its settings are those of no training run.
    """
    require_settings(run)
    history = load_history(run)
    out.mkdir(parents=True, exist_ok=True)
    files = ReportFiles(out / "learning_curve.png", out / "report.html")
    files.png.write_bytes(charts.png_bytes(learning_curve(run.path.name, history)))
    files.html.write_text(report_page(run, history).html(), encoding="utf-8")
    return files


def load_history(run: Run) -> History:
    """Read what a report shows from the run's tables."""
    if not run.iterations:
        raise UsageError(
            f"{run.path} has no complete iteration, so there is nothing to report yet; "
            f"go on with: metaloom resume {run.path}"
        )
    # Asked once: a run that is still training grows while it is read.
    iterations = run.iterations
    lineage, classes = run.lineage(), classes_of(run)
    return History(
        iterations=np.asarray(iterations),
        metrics=_metrics(run.metrics(iterations)),
        task_returns=_task_returns(run.episodes(iterations), len(iterations)),
        stage_seconds=_stage_seconds(lineage, len(iterations), run.stages.first),
        stages=run.stages,
        num_bytes=int(lineage["stored_bytes"].to_numpy().sum()),
        by_class=[*returns_by_class(run, iterations, classes).values()],
        classes=classes,
    )


def learning_curve(name: str, history: History) -> Figure:
    """Average episode return before and after adaptation against environment steps.

    Where every iteration has tasks of every class, all classes count alike: which ones an iteration drew more of does
    not show then.
    """
    balanced = history.every_class_drawn
    return charts.line_chart(
        f"Learning curve of {name}",
        history.env_steps,
        "environment steps",
        "class-balanced episode return" if balanced else "average episode return",
        list(_balanced_series(history) if balanced else _return_series(history)),
        note=BALANCED_NOTE if balanced else BAND_NOTE,
        band=ERROR_BAND if balanced else BAND,
        size=(8.6, 4.4),
    )


def report_page(run: Run, history: History) -> Page:
    """Compose the page of a run."""
    config = run.config
    return Page(
        title=run.path.name,
        subtitle=f"{config['algorithm']['name']} on {config['env']['name']}, seed {config['seed']}",
        tiles=_tiles(run, history),
        main_picture=_picture(
            learning_curve(run.path.name, history),
            "Learning curve: average episode return before and after adaptation against environment steps",
        ),
        sections=[
            *([("Success", pictures)] if (pictures := list(_success_pictures(history))) else []),
            *_class_section(history),
            *_evaluation_section(run, history),
            ("Optimization", list(_optimization_pictures(history))),
            ("Time", list(_time_pictures(history))),
        ],
        tables={
            **_class_table(history),
            "Configuration": list(dotted(config)),
            f"Metrics of iteration {history.iterations[-1]}": [
                (name, number(float(values[-1]))) for name, values in history.metrics.items()
            ],
            "Versions and machine": _provenance(run.info),
        },
        unfolded=["Configuration", CLASS_TABLE],
    )


def _class_section(history: History) -> Iterator[tuple[str, list[Picture]]]:
    if not history.by_class:
        return
    last, names = history.last_step, history.by_class[0][0].names
    pictures: list[Picture] = []
    for k in sorted({last, 0}, reverse=True):
        title = f"Return by class of task, {adaptation_label(k, last)}" if last else "Return by class of task"
        series = [
            estimates_series(name, charts.class_color(c), [steps[k].estimates[c] for steps in history.by_class])
            for c, name in enumerate(names)
        ]
        figure = charts.line_chart(
            title,
            history.env_steps,
            "environment steps",
            "average episode return",
            series,
            note=CLASS_NOTE,
            band=ERROR_BAND,
        )
        pictures.append(_picture(figure, f"{title}, against environment steps"))
    yield "By class of task", pictures


def _class_table(history: History) -> dict[str, list[tuple[str, str]]]:
    if not history.by_class:
        return {}
    before, after = named_estimates(history.by_class[-1][0]), named_estimates(history.by_class[-1][-1])
    rows: list[tuple[str, str]] = []
    for (name, num_tasks, first), (_, _, last) in zip(before, after, strict=True):
        change = f"{plus_minus(first)} → " if history.last_step else ""
        rows.append((f"{name} ({plural(num_tasks, 'task')})", f"{change}{plus_minus(last)}"))
    return {CLASS_TABLE: rows}


def _balanced_series(history: History) -> Iterator[Series]:
    last = history.last_step
    for k in range(last + 1):
        series = estimates_series(
            adaptation_label(k, last), charts.step_color(k, last), [steps[k].balanced for steps in history.by_class]
        )
        # As without classes: between the first and the last a band would only cover the others.
        yield series if k in (0, last) else replace(series, band=None)


def _evaluation_section(run: Run, history: History) -> Iterator[tuple[str, list[Picture]]]:
    evaluations = {i: e for i, e in stored_evaluations(run).items() if i in history.iterations}
    if not evaluations:
        return
    latest = max(evaluations)
    over_training = training_curve(run.path.name, history.env_steps[[*evaluations]], [*evaluations.values()])
    classes = history.classes
    by_class = (
        []
        if classes is None
        else [
            training_curve_by_class(run.path.name, history.env_steps[[*evaluations]], [*evaluations.values()], classes)
        ]
    )
    over_adaptation = per_shot_curve(f"Adaptation after {plural(latest + 1, 'update')}", evaluations[latest])
    note = "Test episodes are fresh: no adaptation step learns from them, and training counts none of their steps."
    yield (
        "Evaluation",
        [
            _picture(over_training, "Test return before and after adaptation against environment steps", note),
            *(_picture(figure, "Test return by class of task against environment steps") for figure in by_class),
            _picture(over_adaptation, "Test return of the last evaluation against adaptation episodes"),
        ],
    )


def _return_series(history: History) -> Iterator[Series]:
    last = history.last_step
    for k in range(last + 1):
        by_task = history.task_returns[:, k]
        # Between the first and the last a band would only cover the others.
        edges = np.quantile(by_task, [0.25, 0.75], axis=1) if k in (0, last) else None
        band = None if edges is None or by_task.shape[1] == 1 else (edges[0], edges[1])
        yield Series(adaptation_label(k, last), charts.step_color(k, last), by_task.mean(axis=1), band)


def _success_pictures(history: History) -> Iterator[Picture]:
    yield from _chart_of(
        history,
        "Success rate",
        "share of episodes",
        _of_every_step(history, "success_rate"),
        "Episodes in any step of which the environment told of success.",
    )


def _optimization_pictures(history: History) -> Iterator[Picture]:
    yield from _chart_of(
        history,
        "KL divergence of the meta-update",
        "KL divergence (nats)",
        {
            "inner_kl": ("before adaptation (inner)", charts.BEFORE),
            "outer_kl": ("after adaptation (outer)", charts.AFTER),
        },
        "How far an iteration's update moved the policy from the one that collected its episodes.",
    )
    yield from _chart_of(
        history,
        "Policy entropy",
        "entropy (nats)",
        _of_every_step(history, "entropy"),
        "Falls as the policy's standard deviations shrink.",
    )
    yield from _chart_of(
        history,
        "Loss of the meta-update",
        "surrogate loss",
        {"loss_before": ("before the update", charts.BEFORE), "loss_after": ("after the update", charts.AFTER)},
        "Of the same episodes; the gap is what the update gained on them.",
    )
    yield from _chart_of(
        history,
        "Signal and noise of the meta-gradient",
        "norm",
        {
            "meta_gradient_norm": ("meta-gradient", charts.AFTER),
            "meta_gradient_standard_error": ("its standard error over tasks", charts.BEFORE),
        }
        if "meta_gradient_standard_error" in history.metrics
        else {},
        "Where the norm is no larger than its standard error, other tasks would have led elsewhere.",
    )
    yield from _chart_of(
        history,
        "Agreement of two halves of the tasks",
        "cosine of their meta-gradients",
        {"meta_gradient_split_cosine": ("cosine", charts.AFTER)},
        "1: both halves lead the same way; around 0: the direction of the update is that of noise.",
    )
    yield from _chart_of(
        history,
        "Explained variance of the baseline",
        "share of variance",
        _of_every_step(history, "explained_variance"),
        "1: the baseline predicts the returns exactly; 0: no better than their mean.",
    )


def _of_every_step(history: History, metric: str) -> dict[str, tuple[str, str]]:
    last = history.last_step
    return {f"step_{k}.{metric}": (adaptation_label(k, last), charts.step_color(k, last)) for k in range(last + 1)}


def _chart_of(
    history: History, title: str, y_label: str, lines: Mapping[str, tuple[str, str]], caption: str
) -> Iterator[Picture]:
    """A chart of metrics, name -> (label, colour), if the run has any of them."""
    series = [
        Series(label, color, history.metrics[name]) for name, (label, color) in lines.items() if name in history.metrics
    ]
    if series:
        figure = charts.line_chart(title, history.env_steps, "environment steps", y_label, series)
        yield _picture(figure, f"{title} against environment steps", caption)


def _time_pictures(history: History) -> Iterator[Picture]:
    layers = [
        Series(stage_name(ref), charts.stage_color(history.stages[ref.stage].group, ref.step), seconds)
        for ref, seconds in history.stage_seconds.items()
    ]
    typical = np.array([_typical_seconds(layer.values) for layer in layers])
    shares = typical / max(float(typical.sum()), 1e-12)
    yield _picture(
        charts.bar_chart(
            "Seconds per iteration by stage",
            [layer.label for layer in layers],
            typical,
            [f"{short_time(value)}  ({100 * share:.0f} %)" for value, share in zip(typical, shares, strict=True)],
            "wall seconds (median over iterations)",
            [layer.color for layer in layers],
        ),
        "Median wall seconds of every stage",
        "Computing alone; writing to disk happens beside it.",
    )
    yield _picture(
        charts.stacked_chart("Where the time went", history.iterations, "iteration", "wall seconds", layers),
        "Wall seconds of every stage over iterations",
        "A bulge is a busy machine or a worker that was lost; the results do not depend on it.",
    )


def _typical_seconds(seconds: Array) -> float:
    """Median over iterations; of a stage that only some of them have, its share of each."""
    missing = np.isnan(seconds)
    return float(np.where(missing, 0, seconds).mean() if missing.any() else np.median(seconds))


def _tiles(run: Run, history: History) -> list[tuple[str, str]]:
    returns = history.task_returns[-1].mean(axis=1)
    compute = sum(float(np.nansum(seconds)) for seconds in history.stage_seconds.values())
    last = history.last_step
    shown = (
        {f"last return {adaptation_label(k, last)}": returns[k] for k in (0, last)}
        if last
        else {"last return": returns[0]}
    )
    return [
        ("iterations done", f"{len(history.iterations):,} of {planned_iterations(run):,}"),
        ("environment steps", count(float(history.env_steps[-1]))),
        *((what, number(value)) for what, value in shown.items()),
        ("computing time (h:mm:ss)", duration(compute)),
        ("on disk", size(history.num_bytes)),
    ]


def _provenance(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List when, where and with what the run was made; each fact once, however many places recorded it."""
    facts = {"created": info["created"], "configuration digest": info["config_digest"]}
    return list(dotted(facts | info["versions"] | info["environment"] | info["system"]))


def _picture(figure: Figure, alternative: str, caption: str = "") -> Picture:
    return Picture(charts.svg_data_uri(figure), alternative, caption)


def _metrics(table: pa.Table) -> dict[str, Array]:
    return {
        name: table[name].cast(pa.float64()).to_numpy().astype(np.float64, copy=False)
        for name in table.column_names
        if name != "iteration"
    }


def _task_returns(episodes: pa.Table, num_iterations: int) -> Array:
    means = episodes.group_by(["iteration", "step", "task"]).aggregate([("return", "mean")])
    means = means.sort_by([("iteration", "ascending"), ("step", "ascending"), ("task", "ascending")])
    inner_steps = len(means["step"].unique())
    return means["return_mean"].to_numpy().reshape(num_iterations, inner_steps, -1)


def _stage_seconds(lineage: pa.Table, num_iterations: int, first_stage: str) -> dict[StageRef, Array]:
    # In the order of writing. What makes the first learner has no share in an iteration.
    seconds: dict[StageRef, Array] = {}
    for row in lineage.sort_by("sequence").select(["iteration", "stage", "step", "seconds"]).to_pylist():
        if row["stage"] != first_stage and row["iteration"] < num_iterations:
            by_iteration = seconds.setdefault(StageRef(0, row["stage"], row["step"]), np.full(num_iterations, np.nan))
            by_iteration[row["iteration"]] = row["seconds"]
    return seconds
