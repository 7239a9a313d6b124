"""A run as a picture and a page: learning curve, divergences, entropy, timing by stage, configuration."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from metaloom.flows.runs import require_settings
from metaloom.flows.views import charts
from metaloom.flows.views.class_returns import named_estimates, plus_minus
from metaloom.flows.views.evaluation_lines import stored_evaluations, training_lines, training_lines_by_class
from metaloom.flows.views.evaluation_plots import per_shot_curve, training_curve
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
from metaloom.flows.views.history import History, class_lines, learning_lines, load_history
from metaloom.flows.views.metric_curves import optimization_lines, success_lines
from metaloom.flows.views.page import Page, Picture
from metaloom.flows.views.run_info import planned_iterations
from metaloom.flows.views.series import Lines, Series
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageRef, StageTable

CLASS_TABLE = "Returns of the last iteration by class of task, ± standard error over tasks"


@dataclass(frozen=True)
class ReportFiles:
    """Files of a report."""

    png: Path
    html: Path


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


def learning_curve(name: str, history: History) -> Figure:
    """Average episode return before and after adaptation against environment steps."""
    return _figure(history, learning_lines(name, history), size=(8.6, 4.4))


def report_page(run: Run, history: History) -> Page:
    """Compose the page of a run."""
    config, lineage = run.config, run.lineage()
    seconds = stage_seconds(lineage, len(history.iterations), run.stages.first)
    num_bytes = int(lineage["stored_bytes"].to_numpy().sum())
    return Page(
        title=run.path.name,
        subtitle=f"{config['algorithm']['name']} on {config['env']['name']}, seed {config['seed']}",
        tiles=_tiles(run, history, seconds, num_bytes),
        main_picture=_picture(
            learning_curve(run.path.name, history),
            "Learning curve: average episode return before and after adaptation against environment steps",
        ),
        sections=[
            *([("Success", pictures)] if (pictures := _metric_pictures(history, success_lines(history))) else []),
            *_class_section(history),
            *_evaluation_section(run, history),
            ("Optimization", _metric_pictures(history, optimization_lines(history))),
            ("Time", list(_time_pictures(history.iterations, run.stages, seconds))),
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
    pictures = [
        _picture(_figure(history, lines), f"{lines.title}, against environment steps") for lines in class_lines(history)
    ]
    if pictures:
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


def _evaluation_section(run: Run, history: History) -> Iterator[tuple[str, list[Picture]]]:
    evaluations = {i: e for i, e in stored_evaluations(run).items() if i in history.iterations}
    if not evaluations:
        return
    latest = max(evaluations)
    env_steps, name, classes = history.env_steps[[*evaluations]], run.path.name, history.classes
    over_training = training_curve(env_steps, training_lines(name, [*evaluations.values()]))
    by_class = (
        []
        if classes is None
        else [training_curve(env_steps, training_lines_by_class(name, [*evaluations.values()], classes))]
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


def _metric_pictures(history: History, lines: Iterable[Lines]) -> list[Picture]:
    """Charts whose notes stand below them."""
    return [
        _picture(_figure(history, replace(one, note="")), f"{one.title} against environment steps", one.note)
        for one in lines
    ]


def _figure(history: History, lines: Lines, size: tuple[float, float] = (6.4, 3.4)) -> Figure:
    return charts.line_chart(
        lines.title,
        history.env_steps,
        "environment steps",
        lines.y_label,
        lines.series,
        note=lines.note,
        band=lines.band,
        size=size,
    )


def _time_pictures(iterations: Array, stages: StageTable, stage_seconds: Mapping[StageRef, Array]) -> Iterator[Picture]:
    layers = [
        Series(stage_name(ref), charts.stage_color(stages[ref.stage].group, ref.step), seconds)
        for ref, seconds in stage_seconds.items()
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
        charts.stacked_chart("Where the time went", iterations, "iteration", "wall seconds", layers),
        "Wall seconds of every stage over iterations",
        "A bulge is a busy machine or a worker that was lost; the results do not depend on it.",
    )


def _typical_seconds(seconds: Array) -> float:
    """Median over iterations; of a stage that only some of them have, its share of each."""
    missing = np.isnan(seconds)
    return float(np.where(missing, 0, seconds).mean() if missing.any() else np.median(seconds))


def _tiles(
    run: Run, history: History, stage_seconds: Mapping[StageRef, Array], num_bytes: int
) -> list[tuple[str, str]]:
    returns = history.task_returns[-1].mean(axis=1)
    compute = sum(float(np.nansum(seconds)) for seconds in stage_seconds.values())
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
        ("on disk", size(num_bytes)),
    ]


def _provenance(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List when, where and with what the run was made; each fact once, however many places recorded it."""
    facts = {"created": info["created"], "configuration digest": info["config_digest"]}
    return list(dotted(facts | info["versions"] | info["environment"] | info["system"]))


def _picture(figure: Figure, alternative: str, caption: str = "") -> Picture:
    return Picture(charts.svg_data_uri(figure), alternative, caption)


def stage_seconds(lineage: pa.Table, num_iterations: int, first_stage: str) -> dict[StageRef, Array]:
    """Wall seconds of every stage, [I] each, in the order in which stages run; keys are of iteration 0."""
    # In the order of writing. What makes the first learner has no share in an iteration.
    seconds: dict[StageRef, Array] = {}
    for row in lineage.sort_by("sequence").select(["iteration", "stage", "step", "seconds"]).to_pylist():
        if row["stage"] != first_stage and row["iteration"] < num_iterations:
            by_iteration = seconds.setdefault(StageRef(0, row["stage"], row["step"]), np.full(num_iterations, np.nan))
            by_iteration[row["iteration"]] = row["seconds"]
    return seconds
