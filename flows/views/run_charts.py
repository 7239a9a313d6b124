"""All charts of a run as data: each is defined here once, for the page, for files and for notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from metaloom.flows.formatting import adaptation_label, plural, short_time, stage_name
from metaloom.flows.views.charts import stage_color
from metaloom.flows.views.evaluation_plots import per_shot_chart
from metaloom.flows.views.history import (
    History,
    class_lines,
    learning_lines,
    optimization_lines,
    stored_evaluations,
    success_lines,
    training_lines,
    training_lines_by_class,
    trial_lines,
)
from metaloom.flows.views.series import (
    AFTER,
    CLASS_NOTE,
    ERROR_BAND,
    MOST_STEPS,
    Chart,
    Lines,
    Panel,
    Series,
    chart_of,
    class_color,
    estimates_series,
    evenly_spaced,
    explain_gaps,
    shown_steps,
)
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageRef
from metaloom.storage.progress import Progress, unseen

STEPS = "environment steps"
_TOLD_EVERY = 1000
"""Records between two reports of progress."""
MOST_ITERATIONS, MOST_POINTS = 100, 20_000
"""Limits for showing single tasks: number of iterations, fewer if their tasks exceed the number of points."""


def run_charts(run: Run, history: History, seconds: Mapping[StageRef, Array] | None = None) -> list[Chart]:
    """Return every chart of a run, in page order. `seconds` as from `stage_seconds`, read if omitted."""
    of_metrics: Sequence[tuple[str, Iterator[Lines]]] = (
        ("Trials", trial_lines(history)),
        ("Success", success_lines(history)),
        ("Optimization", optimization_lines(history)),
    )
    trials, success, optimization = (
        [_over_training(lines, section, history) for lines in charts] for section, charts in of_metrics
    )
    return [
        learning_chart(run.path.name, history),
        *trials,
        *_class_charts(history),
        *_task_charts(history),
        *success,
        *_evaluation_charts(run, history),
        *optimization,
        *_time_charts(run, history, stage_seconds(run, len(history.iterations)) if seconds is None else seconds),
    ]


def learning_chart(name: str, history: History) -> Chart:
    """Average episode return before and after adaptation against environment steps."""
    return _over_training(learning_lines(name, history), "Return", history, wide=True)


def _over_training(lines: Lines, section: str, history: History, *, wide: bool = False) -> Chart:
    return chart_of(lines, section, history.env_steps, STEPS, iterations=history.iterations, wide=wide)


def _class_charts(history: History) -> Iterator[Chart]:
    if not history.by_class:
        return
    section, names, last = "By class of task", history.by_class[0][0].names, history.last_step
    colors, panels = shown_steps(last), list[Panel]()
    for c, name in enumerate(names):
        ends = ((k, [steps[k].estimates[c] for steps in history.by_class]) for k in dict.fromkeys((0, last)))
        series = (estimates_series(adaptation_label(k, last), colors[k], estimates) for k, estimates in ends)
        panels.append(Panel(name, tuple(series)))
    if len(names) > 1 and last:
        # Lines of all panels together, to see whether any of them has a gap.
        every = tuple(line for panel in panels for line in panel.series)
        told = explain_gaps(Lines("", "", "", CLASS_NOTE, ERROR_BAND, every))
        title = "Before and after adaptation, each class of task"
        yield Chart(
            "classes", section, "lines", title, STEPS, "average episode return", told.note, told.band,
            history.env_steps, tuple(panels), iterations=history.iterations, wide=True,
        )  # fmt: skip
    for lines in class_lines(history):
        yield _over_training(lines, section, history)


def _task_charts(history: History) -> Iterator[Chart]:
    """Yield charts with every task as a point: before against after in the last iteration, and over training."""
    last, num_tasks = history.last_step, history.task_returns.shape[2]
    if num_tasks == 1:
        return
    # The class of every task, [I, B]; one class where there are none.
    names, kinds = ("tasks",), np.zeros((len(history.iterations), num_tasks), int)
    if history.task_classes is not None and history.by_class:
        names, kinds = history.by_class[0][0].names, history.task_classes
    if last:
        before, after = history.task_returns[-1, 0], history.task_returns[-1, last]
        note = (
            f"one point per task of iteration {history.iterations[-1]}: mean return of its episodes before and after "
            "adaptation; above the line adaptation helped"
        )
        yield Chart(
            "adaptation", "Tasks", "points", "What adaptation did to every task", "return before adaptation",
            "return after adaptation", note, "", before, _by_kind(names, kinds[-1], after), diagonal=True,
        )  # fmt: skip
    most = min(MOST_ITERATIONS, max(MOST_POINTS // num_tasks, 2))
    rows = evenly_spaced(len(history.iterations), most)
    shown = "" if len(rows) == len(history.iterations) else f", of {len(rows)} iterations evenly spaced"
    when = f" {adaptation_label(last, last)}" if last else ""
    yield Chart(
        "task_returns", "Tasks", "points", f"Return of every task{when}", STEPS, "mean episode return",
        f"one point per task and iteration{shown}: each iteration draws new tasks", "",
        np.repeat(history.env_steps[rows], num_tasks),
        _by_kind(names, kinds[rows].ravel(), history.task_returns[rows, last].ravel()),
        iterations=np.repeat(history.iterations[rows], num_tasks),
    )  # fmt: skip


def _by_kind(names: Sequence[str], kinds: Array, values: Array) -> tuple[Panel, ...]:
    colors = [AFTER] if len(names) == 1 else [class_color(c) for c in range(len(names))]
    series = (
        Series(name, color, np.where(kinds == c, values, np.nan))
        for c, (name, color) in enumerate(zip(names, colors, strict=True))
    )
    return (Panel("", tuple(series)),)


def _evaluation_charts(run: Run, history: History) -> Iterator[Chart]:
    done = {*history.iterations.tolist()}
    evaluations = {i: e for i, e in stored_evaluations(run).items() if i in done}
    if not evaluations:
        return
    rows, latest, name = [*evaluations], max(evaluations), run.path.name
    env_steps, stored = history.env_steps[np.searchsorted(history.iterations, rows)], [*evaluations.values()]
    lines = [training_lines(name, stored)]
    if history.classes is not None:
        lines.append(training_lines_by_class(name, stored, history.classes))
    for each in lines:
        yield chart_of(each, "Evaluation", env_steps, f"{STEPS} of training", iterations=np.array(rows), wide=True)
    yield per_shot_chart(f"Adaptation after {plural(latest + 1, 'update')}", evaluations[latest])


def _time_charts(run: Run, history: History, seconds: Mapping[StageRef, Array]) -> Iterator[Chart]:
    if not seconds:
        return
    layers = [*_layers(seconds, run)]
    typical = np.array([_typical_seconds(layer.values) for layer in layers])
    shares = typical / max(float(typical.sum()), 1e-12)
    bars = tuple(
        Series(layer.label, layer.color, np.array([value])) for layer, value in zip(layers, typical, strict=True)
    )
    texts = (f"{short_time(value)}  ({100 * share:.0f} %)" for value, share in zip(typical, shares, strict=True))
    yield Chart(
        "stage_seconds", "Time", "bars", "Seconds per iteration by stage", "wall seconds (median over iterations)", "",
        "Computing alone; writing to disk happens beside it.", "", np.zeros(1), (Panel("", bars),),
        texts=tuple(texts),
    )  # fmt: skip
    yield Chart(
        "stage_seconds_by_iteration", "Time", "layers", "Where the time went", "iteration", "wall seconds",
        "A bulge is a busy machine or a worker that was lost; the results do not depend on it.", "",
        history.iterations, (Panel("", tuple(layers)),), iterations=history.iterations,
    )  # fmt: skip


def _layers(seconds: Mapping[StageRef, Array], run: Run) -> Iterator[Series]:
    """Yield a series for every stage, or one in all for a stage with more inner steps than charts can distinguish."""
    by_stage: dict[str, list[StageRef]] = {}
    for ref in seconds:
        by_stage.setdefault(ref.stage, []).append(ref)
    for ref, values in seconds.items():
        refs = by_stage[ref.stage]
        color = stage_color(run.stages[ref.stage].group, ref.step)
        if len(refs) <= MOST_STEPS:
            yield Series(stage_name(ref), color, values)
        elif ref == refs[0]:
            name = f"{stage_name(ref)} to {refs[-1].step}"
            yield Series(name, color, np.sum([seconds[each] for each in refs], axis=0))


def _typical_seconds(seconds: Array) -> float:
    """Median over iterations; of a stage that only some of them have, its share of each."""
    missing = np.isnan(seconds)
    return float(np.where(missing, 0, seconds).mean() if missing.any() else np.median(seconds))


def stage_seconds(run: Run, num_iterations: int, on_progress: Progress = unseen) -> dict[StageRef, Array]:
    """Wall seconds of every stage, [I] each, in the order in which stages run; keys are of iteration 0."""
    # What makes the first learner has no share in an iteration.
    refs = [ref for ref in run.refs() if ref.stage != run.stages.first and ref.iteration < num_iterations]
    seconds: dict[StageRef, Array] = {}
    written: dict[StageRef, int] = {}
    for n, ref in enumerate(refs):
        if n % _TOLD_EVERY == 0:
            on_progress(n, len(refs))
        record, stage = run.record(ref), replace(ref, iteration=0)
        seconds.setdefault(stage, np.full(num_iterations, np.nan))[ref.iteration] = record.seconds
        written[stage] = min(record.sequence, written.get(stage, record.sequence))
    return {stage: seconds[stage] for stage in sorted(seconds, key=written.__getitem__)}
