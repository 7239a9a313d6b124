"""All charts of a run as data, for the report, the viewer, files and notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metaloom.flows.formatting import TRIAL_RETURNS, adaptation_label, plural, short_time, stage_name
from metaloom.flows.results.class_returns import count_alike
from metaloom.flows.results.evaluation import AdaptationSummary, summarize_classes, summarize_steps
from metaloom.flows.views import charts
from metaloom.flows.views.history import STEPS, RunHistory, evaluation_after, stage_seconds
from metaloom.flows.views.series import (
    AFTER,
    BEFORE,
    BETWEEN,
    CLASS_NOTE,
    ERROR_BAND,
    INK,
    MOST_STEPS,
    Chart,
    Panel,
    Series,
    alone,
    class_color,
    estimates_series,
    evenly_spaced,
    explain_gaps,
    shown_steps,
    stage_color,
    steps_note,
)
from metaloom.pipeline.comparison.groups import Band, Estimate
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import Run, StageRef

if TYPE_CHECKING:
    from metaloom.flows.results.comparison import Comparison


BAND_NOTE = "line: mean over episodes; band: middle half (25–75%) of the per-task means"
BAND = "middle half of the tasks"
BALANCED_NOTE = "line: mean of the per-class means, with equal weights; band: ± 1 standard error over tasks"
INTERVAL_NOTE = "lines: averages over tasks of the mean test return; bands: 95% bootstrap intervals"
INTERVAL = "95% bootstrap interval"
MOST_ITERATIONS, MOST_POINTS = 100, 20_000  # maximum number of iterations, and of points, in charts of single tasks
SECTIONS = ("Return", "Trials", "By class of task", "Tasks", "Success", "Evaluation", "Optimization", "Time")
"""Headings of groups of charts, in page order."""
COLORS = (AFTER, BEFORE, *BETWEEN, INK)
MOST_PAIRS = 12


def run_charts(run: Run, history: RunHistory, seconds: Mapping[StageRef, Array] | None = None) -> list[Chart]:
    """Return all charts of a run, in page order; `seconds` is the result of `stage_seconds`, computed if None."""
    steps = np.full(len(history.iterations), np.nan) if history.env_steps is None else history.env_steps
    each = zip(history.iterations.tolist(), steps.tolist(), strict=True)
    read = ((i, evaluation_after(run, i, env_steps)) for i, env_steps in each)
    evaluations = {i: found for i, found in read if found is not None}
    charts = [*_class_panels(history), *curves(run.path.name, history, evaluations), *_task_charts(history)]
    if evaluations:
        latest = max(evaluations)
        charts.append(per_shot_chart(f"Adaptation after {plural(latest + 1, 'update')}", evaluations[latest][1]))
    charts += _time_charts(run, history, stage_seconds(run, len(history.iterations)) if seconds is None else seconds)
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def curves(name: str, history: RunHistory, evaluations: Mapping[int, tuple[float, Evaluation]]) -> list[Chart]:
    """Return the single-panel charts over training, in page order.

    `evaluations` are the results of `evaluation_after`, keyed by the iteration that each evaluation follows.
    """
    tests = evaluation_lines(name, evaluations, history.classes) if evaluations else ()
    charts = [learning_chart(name, history), *class_lines(history), *metric_lines(history), *tests]
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def _over_training(
    history: RunHistory,
    section: str,
    name: str,
    title: str,
    y_label: str,
    panels: tuple[Panel, ...],
    note: str,
    band: str = "",
    *,
    wide: bool = False,
) -> Chart:
    """Return a line chart over training, whose x axis is `RunHistory.axis`."""
    x, x_label = history.axis
    about = (name, section, "lines", title, x_label, y_label, note, band, x)
    chart = Chart(*about, panels=panels, iterations=history.iterations, wide=wide)
    return explain_gaps(chart) if band == ERROR_BAND else chart


def learning_chart(name: str, history: RunHistory) -> Chart:
    """Return the chart of the average episode return before and after adaptation.

    If `count_alike` is True, the average is class-balanced: it does not depend on how many tasks each class has.
    """
    last, is_balanced, series = history.last_step, count_alike(history.by_class), list[Series]()
    for k, color in shown_steps(last).items():
        label = adaptation_label(k, last)
        # bands only for the first and last line, since more would overlap
        if is_balanced:
            line = estimates_series(label, color, [steps[k].balanced for steps in history.by_class])
            series.append(line if k in (0, last) else replace(line, band=None))
        else:
            by_task = history.task_returns[:, k]
            low, high = np.quantile(by_task, [0.25, 0.75], axis=1)
            band = (low, high) if k in (0, last) and by_task.shape[1] > 1 else None
            series.append(Series(label, color, by_task.mean(axis=1), band))
    y_label, note, band = "average episode return", BAND_NOTE, BAND
    if is_balanced:
        y_label, note, band = "class-balanced episode return", BALANCED_NOTE, ERROR_BAND
    title, note = f"Learning curve of {name}", note + steps_note(last)
    return _over_training(history, "Return", "learning_curve", title, y_label, alone(series), note, band, wide=True)


def class_lines(history: RunHistory) -> Iterator[Chart]:
    """Yield the charts of the average episode return per task class: after adaptation, then before it."""
    last, names = history.last_step, history.by_class[0][0].names if history.by_class else ()
    for k in dict.fromkeys((last, 0)) if names else ():
        title = f"Return by class of task, {adaptation_label(k, last)}" if last else "Return by class of task"
        name = "returns_by_class" if k == last else "returns_by_class_before"
        series = (
            estimates_series(label, class_color(c), [steps[k].estimates[c] for steps in history.by_class])
            for c, label in enumerate(names)
        )
        y_label, section = "average episode return", "By class of task"
        yield _over_training(history, section, name, title, y_label, alone(series), CLASS_NOTE, ERROR_BAND)


def _class_panels(history: RunHistory) -> Iterator[Chart]:
    if not history.by_class:
        return
    names, last = history.by_class[0][0].names, history.last_step
    if len(names) < 2 or not last:
        return
    colors, panels = shown_steps(last), list[Panel]()
    for c, name in enumerate(names):
        ends = ((k, [steps[k].estimates[c] for steps in history.by_class]) for k in (0, last))
        series = (estimates_series(adaptation_label(k, last), colors[k], estimates) for k, estimates in ends)
        panels.append(Panel(name, tuple(series)))
    title = "Before and after adaptation, by class of task"
    about = ("By class of task", "classes", title, "average episode return", tuple(panels), CLASS_NOTE, ERROR_BAND)
    yield _over_training(history, *about, wide=True)


def _task_charts(history: RunHistory) -> Iterator[Chart]:
    """Yield the charts with a point per task: return after adaptation against before it, and returns over training."""
    last, num_tasks = history.last_step, history.task_returns.shape[2]
    if num_tasks == 1:
        return
    # class of each task, [I, B]; a single class if there are no task classes
    names, kinds = ("tasks",), np.zeros((len(history.iterations), num_tasks), int)
    if history.task_classes is not None and history.by_class:
        names, kinds = history.by_class[0][0].names, history.task_classes
    if last:
        before, after = history.task_returns[-1, 0], history.task_returns[-1, last]
        yield Chart(
            "adaptation", "Tasks", "points", "What adaptation did for each task", "return before adaptation",
            "return after adaptation",
            f"one point per task of iteration {history.iterations[-1]}: mean return of its episodes before and after "
            "adaptation; above the line, adaptation helped",
            "", before, _by_kind(names, kinds[-1], after), diagonal=True,
        )  # fmt: skip
    most = min(MOST_ITERATIONS, max(MOST_POINTS // num_tasks, 2))
    rows = evenly_spaced(len(history.iterations), most)
    shown = "" if len(rows) == len(history.iterations) else f", of {len(rows)} iterations evenly spaced"
    when = f" {adaptation_label(last, last)}" if last else ""
    x, x_label = history.axis
    yield Chart(
        "task_returns", "Tasks", "points", f"Return of each task{when}", x_label, "mean episode return",
        f"one point per task and iteration{shown}: each iteration draws new tasks", "",
        np.repeat(x[rows], num_tasks),
        _by_kind(names, kinds[rows].ravel(), history.task_returns[rows, last].ravel()),
        iterations=np.repeat(history.iterations[rows], num_tasks),
    )  # fmt: skip


def _by_kind(names: Sequence[str], kinds: Array, values: Array) -> tuple[Panel, ...]:
    colors = [AFTER] if len(names) == 1 else [class_color(c) for c in range(len(names))]
    each = enumerate(zip(names, colors, strict=True))
    return alone(Series(name, color, np.where(kinds == c, values, np.nan)) for c, (name, color) in each)


def metric_lines(history: RunHistory) -> Iterator[Chart]:
    """Yield the charts of metrics about trials, success and updates, as far as the run contains them."""
    metrics, last, shown = history.metrics, history.last_step, steps_note(history.last_step)

    def of_steps(metric: str) -> dict[str, tuple[str, str]]:
        return {f"step_{k}.{metric}": (adaptation_label(k, last), color) for k, color in shown_steps(last).items()}

    first, final = (metrics.get(name) for name in TRIAL_RETURNS)
    ends = dict(zip(TRIAL_RETURNS, (("first episode", BEFORE), ("last episode", AFTER)), strict=True))
    if first is None or final is None or np.array_equal(first, final, equal_nan=True):
        ends = {}  # trials have one episode
    gained = "; the gap is what the update gained on them" if "loss_before" in metrics else ""
    norm, noise = "Norm of the meta-gradient", "To record how much of it is noise, set algorithm.gradient_noise=true."
    if "meta_gradient_standard_error" in metrics:
        norm = "Signal and noise of the meta-gradient"
        noise = "Where the norm is no larger than its standard error, other tasks would have given another direction."
    charts = (
        ("Trials", "trial_returns", "First and last episode of a trial", "average episode return", ends,
         "Over all trials of an iteration; the gap is what the policy gains by remembering earlier episodes."),
        ("Success", "success_rate", "Success rate", "share of episodes", of_steps("success_rate"),
         f"Episodes with at least one step that the environment reported as success{shown}."),
        ("Optimization", "kl_divergence", "KL divergence of the update", "KL divergence (nats)",
         {"inner_kl": ("before adaptation (inner)", BEFORE), "outer_kl": ("after adaptation (outer)", AFTER)},
         "How far an iteration's update moved the policy from the one that collected its episodes."),
        ("Optimization", "entropy", "Policy entropy", "entropy (nats)", of_steps("entropy"),
         f"Falls as the policy becomes more certain of its actions{shown}."),
        ("Optimization", "loss", "Loss of the update", "surrogate loss",
         {"loss_before": ("before the update", BEFORE), "loss_after": ("after the update", AFTER)},
         f"On the iteration's episodes{gained}."),
        ("Optimization", "meta_gradient", norm, "norm",
         {"meta_gradient_norm": ("meta-gradient", AFTER),
          "meta_gradient_standard_error": ("its standard error over tasks", BEFORE)}, noise),
        ("Optimization", "gradient_norm", "Norm of the gradient", "norm",
         {"gradient_norm": ("of the loss", AFTER), "q_gradient_norm": ("of the value function's loss", BEFORE)},
         "Gradient norms of an iteration's updates, before any clipping."),
        ("Optimization", "meta_gradient_agreement", "Agreement of two halves of the tasks",
         "cosine of their meta-gradients", {"meta_gradient_split_cosine": ("cosine", AFTER)},
         "1: both halves point the same way; around 0: the direction of the update is noise."),
        ("Optimization", "explained_variance", "Explained variance of the baseline", "share of variance",
         of_steps("explained_variance"),
         f"1: the baseline predicts the returns exactly; 0: no better than their mean{shown}."),
    )  # fmt: skip
    for section, chart, title, y_label, lines, note in charts:
        series = [Series(label, color, metrics[name]) for name, (label, color) in lines.items() if name in metrics]
        if series:
            yield _over_training(history, section, chart, title, y_label, alone(series), note)


def evaluation_lines(
    name: str, evaluations: Mapping[int, tuple[float, Evaluation]], classes: Classes | None
) -> Iterator[Chart]:
    """Yield the charts of test returns in evaluations during training; `evaluations` is as in `curves`.

    The first shows interquartile means after each number of adaptation steps. If the environment has classes, the
    second shows the mean per task class after the last step.
    """
    after = sorted(evaluations)
    env_steps, found = zip(*(evaluations[i] for i in after), strict=True)
    last, summaries, series = found[0].adaptation_steps, [*map(summarize_steps, found)], list[Series]()
    for k, color in shown_steps(last).items():
        line, band = interquartile_means([steps[k] for steps in summaries])
        # bands only for the first and last line, since more would overlap
        label = adaptation_label(k, last) if last else "test return"
        series.append(Series(label, color, line, band if k in (0, last) else None))
    x, x_label, iterations = np.array(env_steps), f"{STEPS} of training", np.array(after)
    if np.isnan(x).any():  # the stages do not count steps
        x, x_label = iterations, "iteration"
    title, y_label = f"Evaluation of {name}", "return of test episodes"
    labels = (title, x_label, f"{y_label} (interquartile mean)", INTERVAL_NOTE + steps_note(last), INTERVAL)
    chart = Chart("evaluation", "Evaluation", "lines", *labels, x, alone(series), iterations=iterations, wide=True)
    yield chart
    if classes is None:
        return
    returns = [summarize_classes(evaluation, classes)[-1] for evaluation in found]
    by_class = (
        estimates_series(name, class_color(c), [of_classes.estimates[c] for of_classes in returns])
        for c, name in enumerate(returns[0].names)
    )
    words = {"title": f"{title} by class of task", "y_label": y_label, "note": CLASS_NOTE, "band": ERROR_BAND}
    yield explain_gaps(replace(chart, name="evaluation_by_class", **words, panels=alone(by_class)))


def interquartile_means(steps: list[AdaptationSummary]) -> tuple[Array, tuple[Array, Array]]:
    """Return the interquartile means and the bounds of their intervals."""
    means, low, high = np.array([(s.iqm_return, s.iqm_low, s.iqm_high) for s in steps]).T
    return means, (low, high)


def per_shot_chart(title: str, evaluation: Evaluation) -> Chart:
    """Return the chart of test returns against the number of adaptation episodes per task."""
    steps, n, note = summarize_steps(evaluation), evaluation.episodes_per_step, INTERVAL_NOTE
    if evaluation.adaptation_steps:
        note = f"an adaptation step after every {'episode' if n == 1 else f'{n} episodes'}; {note}"
    series = (
        Series("interquartile mean", AFTER, *interquartile_means(steps)),
        Series("mean", BEFORE, np.array([step.average_return for step in steps])),
    )
    episodes = np.array([step.adaptation_episodes for step in steps], np.float64)
    labels = (title, "adaptation episodes per task", "return of test episodes", note, INTERVAL)
    return Chart("evaluation_adaptation", "Evaluation", "lines", *labels, episodes, alone(series))


def _time_charts(run: Run, history: RunHistory, seconds: Mapping[StageRef, Array]) -> Iterator[Chart]:
    if not seconds:
        return
    layers = [*_layers(seconds, run)]
    # Medians over iterations, but means for stages that only some iterations have.
    each = (layer.values for layer in layers)
    typical = np.array([np.nansum(v) / len(v) if np.isnan(v).any() else np.median(v) for v in each])
    shares = typical / max(float(typical.sum()), 1e-12)
    bars = (Series(layer.label, layer.color, np.array([value])) for layer, value in zip(layers, typical, strict=True))
    texts = (f"{short_time(value)}  ({100 * share:.0f}%)" for value, share in zip(typical, shares, strict=True))
    yield Chart(
        "stage_seconds", "Time", "bars", "Seconds per iteration by stage", "wall seconds (median over iterations)", "",
        "Computation only; data is written to disk in parallel.", "", np.zeros(1), alone(bars),
        texts=tuple(texts),
    )  # fmt: skip
    yield Chart(
        "stage_seconds_by_iteration", "Time", "layers", "Where the time went", "iteration", "wall seconds",
        "A bump means a busy machine or a lost worker; the results do not depend on it.", "",
        history.iterations, alone(layers), iterations=history.iterations,
    )  # fmt: skip


def _layers(seconds: Mapping[StageRef, Array], run: Run) -> Iterator[Series]:
    """Yield a series per stage and inner step, or per stage if it has too many inner steps to distinguish."""
    for ref, values in seconds.items():
        refs = [other for other in seconds if other.stage == ref.stage]
        color = stage_color(run.stages[ref.stage].group, ref.step)
        if len(refs) <= MOST_STEPS:
            yield Series(stage_name(ref), color, values)
        elif ref == refs[0]:
            name = f"{stage_name(ref)} to {refs[-1].step}"
            yield Series(name, color, np.sum([seconds[each] for each in refs], axis=0))


def comparison_figure(found: "Comparison") -> Figure:
    """Plot interquartile means, curves over environment steps, profiles, and probabilities of improvement."""
    figure, title = Figure(figsize=(11, 7.6), layout="constrained"), f"{found.conditions}\n{found.intervals}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color="#57606a", parse_math=False)
    (means, curves), (profiles, improvements) = figure.subplots(2, 2)
    names = [group.name for group in found.groups]
    colors = [COLORS[place % len(COLORS)] for place in range(len(names))]
    _estimates(means, "Interquartile mean", names, [group.iqm for group in found.groups], colors)
    _begin(curves, "Sample efficiency")
    charts.plot_lines(curves, found.curve_steps, _series(names, [group.curve for group in found.groups], colors))
    curves.set(xlabel="environment steps", ylabel="interquartile mean over runs")
    _begin(profiles, "Performance profile")
    charts.plot_lines(profiles, found.thresholds, _series(names, [group.profile for group in found.groups], colors))
    profiles.set(xlabel="score", ylabel="fraction of scores above")
    pairs = found.pairs[:MOST_PAIRS]
    labels = [f"{pair.a}\nover {pair.b}" for pair in pairs]
    _estimates(improvements, "Probability of improvement", labels, [p.improvement for p in pairs], [INK] * len(pairs))
    improvements.axvline(0.5, color="#8c959f", linewidth=1, linestyle="--")
    improvements.set_xlim(-0.02, 1.02)
    look: dict[str, Any] = {"ncols": min(3, len(names)), "frameon": False, "fontsize": 9}
    charts.plain_legend(figure, [*curves.lines], names, loc="outside lower center", **look)
    return figure


def _estimates(axes: Axes, title: str, labels: list[str], values: list[Estimate], colors: list[str]) -> None:
    _begin(axes, title)
    for place, (estimate, color) in enumerate(zip(values, colors, strict=True)):
        if not np.isnan(estimate.low):
            axes.plot([estimate.low, estimate.high], [place, place], color=color, linewidth=6, alpha=0.35)
        axes.plot([estimate.value], [place], "o", color=color, markersize=6)
    axes.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _series(names: list[str], bands: list[Band], colors: list[str]) -> list[Series]:
    each = zip(names, colors, bands, strict=True)
    return [Series(name, color, band.values, (band.low, band.high)) for name, color, band in each]


def _begin(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    charts.style(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5))
