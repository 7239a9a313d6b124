"""All charts of a run as data, for pages, files and notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_label, plural, short_time, stage_name
from metaloom.flows.views.charts import Drawing, draw, stage_color
from metaloom.flows.views.history import (
    STEPS,
    History,
    class_lines,
    evaluation_lines,
    learning_chart,
    load_history,
    optimization_lines,
    per_shot_chart,
    stored_evaluations,
    success_lines,
    trial_lines,
)
from metaloom.flows.views.series import (
    AFTER,
    CLASS_NOTE,
    ERROR_BAND,
    MOST_STEPS,
    Chart,
    Panel,
    Series,
    class_color,
    estimates_series,
    evenly_spaced,
    explain_gaps,
    shown_steps,
)
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageRef
from metaloom.storage.progress import Progress, unseen

_TOLD_EVERY = 1000
"""Number of records between reports of progress."""
MOST_ITERATIONS, MOST_POINTS = 100, 20_000
"""Limits of charts of single tasks: number of iterations, and of points."""


def run_charts(run: Run, history: History, seconds: Mapping[StageRef, Array] | None = None) -> list[Chart]:
    """Return every chart of a run, in page order; `seconds` as from `stage_seconds`, by default read."""
    return [
        learning_chart(run.path.name, history),
        *trial_lines(history),
        *_class_charts(history),
        *_task_charts(history),
        *success_lines(history),
        *_evaluation_charts(run, history),
        *optimization_lines(history),
        *_time_charts(run, history, stage_seconds(run, len(history.iterations)) if seconds is None else seconds),
    ]


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
        title = "Before and after adaptation, each class of task"
        chart = Chart(
            "classes", section, "lines", title, STEPS, "average episode return", CLASS_NOTE, ERROR_BAND,
            history.env_steps, tuple(panels), iterations=history.iterations, wide=True,
        )  # fmt: skip
        yield explain_gaps(chart)
    yield from class_lines(history)


def _task_charts(history: History) -> Iterator[Chart]:
    """Yield charts with a point per task: after against before adaptation in the last iteration, and over training."""
    last, num_tasks = history.last_step, history.task_returns.shape[2]
    if num_tasks == 1:
        return
    # The class of every task, [I, B]; a single one without classes.
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
    rows, latest = [*evaluations], max(evaluations)
    env_steps = history.env_steps[np.searchsorted(history.iterations, rows)]
    yield from evaluation_lines(run.path.name, evaluations, env_steps, history.classes)
    yield per_shot_chart(f"Adaptation after {plural(latest + 1, 'update')}", evaluations[latest])


def _time_charts(run: Run, history: History, seconds: Mapping[StageRef, Array]) -> Iterator[Chart]:
    if not seconds:
        return
    layers = [*_layers(seconds, run)]
    # Medians over iterations, weighted for stages that only some iterations have.
    missing = [np.isnan(layer.values) for layer in layers]
    typical = np.array(
        [
            np.where(gaps, 0, layer.values).mean() if gaps.any() else np.median(layer.values)
            for layer, gaps in zip(layers, missing, strict=True)
        ]
    )
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
    """Yield a series per stage, joined for stages with too many inner steps to distinguish."""
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


def stage_seconds(run: Run, num_iterations: int, on_progress: Progress = unseen) -> dict[StageRef, Array]:
    """Return the seconds of every stage, [I] each, in order; keys are references in iteration 0."""
    # Exclude the stage that makes the first learner.
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


class Plots:
    """Draws the charts of `metaloom report`, each as a matplotlib figure that a notebook shows.

    A chart that the run lacks raises UsageError, which lists the available ones.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"Plots({self._run.location}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """List the charts that the run has."""
        return [*self._charts()]

    def draw(self, name: str) -> Drawing:
        """Draw a chart by its name."""
        charts = self._charts()
        if name not in charts:
            raise UsageError(f"{self._run.location}: found no chart {name!r}; required one of {', '.join(charts)}")
        return draw(charts[name])

    def learning_curve(self) -> Drawing:
        """Average episode return before and after adaptation against environment steps."""
        return self.draw("learning_curve")

    def classes(self) -> Drawing:
        """Draw returns before and after adaptation, with a panel per class of task."""
        return self.draw("classes")

    def returns_by_class(self) -> Drawing:
        """Draw returns after adaptation, with a line per class of task."""
        return self.draw("returns_by_class")

    def adaptation(self) -> Drawing:
        """Draw returns of the last iteration's tasks after adaptation against returns before it."""
        return self.draw("adaptation")

    def task_returns(self) -> Drawing:
        """Draw the return of every task over training."""
        return self.draw("task_returns")

    def evaluation(self) -> Drawing:
        """Draw test returns of evaluations during training."""
        return self.draw("evaluation")

    def stage_seconds(self) -> Drawing:
        """Draw the seconds per iteration by stage."""
        return self.draw("stage_seconds")

    def _charts(self) -> dict[str, Chart]:
        return {chart.name: chart for chart in run_charts(self._run, load_history(self._run))}
