"""Learning history of a run, iteration by iteration, and the curves that show it. Needs no torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import TRIAL_RETURNS, adaptation_label
from metaloom.flows.results.class_returns import ByStep, classes_of, count_alike, episode_classes
from metaloom.flows.results.evaluation import AdaptationSummary, summarize_classes, summarize_steps
from metaloom.flows.views.series import (
    AFTER,
    BEFORE,
    CLASS_NOTE,
    ERROR_BAND,
    Chart,
    Panel,
    Series,
    class_color,
    estimates_series,
    explain_gaps,
    shown_steps,
    steps_note,
)
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import Run, argument
from metaloom.storage.progress import Progress, unseen

_BLOCK = 200
"""Number of iterations whose episodes are in memory at once."""
STEPS = "environment steps"
BAND_NOTE = "line: mean over episodes; band: middle half (25–75 %) of the tasks' means"
BAND = "middle half of the tasks"
BALANCED_NOTE = (
    "line: mean of the means of all classes of tasks, which count alike; band: ± 1 standard error over tasks"
)
INTERVAL_NOTE = "lines: averages over tasks of their mean test return; bands: 95 % bootstrap intervals"
INTERVAL = "95 % bootstrap interval"


@dataclass(frozen=True)
class History:
    """Learning history of a run, one row per complete iteration.

    Attributes:
        iterations: Iteration indices, [I].
        metrics: Metrics by name, [I] float64 each; NaN if an iteration lacks a metric.
        task_returns: Mean episode return by inner step and task, [I, K+1, B].
        by_class: Returns by class of task and inner step, [I]; empty without classes.
        task_classes: Class index of every task, [I, B]; None without classes.
        classes: Task classes of the environment.
    """

    iterations: Array
    metrics: Mapping[str, Array]
    task_returns: Array
    by_class: Sequence[ByStep] = ()
    task_classes: Array | None = None
    classes: Classes | None = None

    @property
    def env_steps(self) -> Array:
        """Environment steps up to the end of each iteration, [I]."""
        return self.metrics["env_steps"]

    @property
    def last_step(self) -> int:
        """The number of inner steps, K."""
        return self.task_returns.shape[1] - 1

    def followed_by(self, newer: "History") -> "History":
        """Append the history of later iterations."""
        both = [(history.metrics, np.full(len(history.iterations), np.nan)) for history in (self, newer)]
        names = {**self.metrics, **newer.metrics}
        return replace(
            newer,
            iterations=np.concatenate([self.iterations, newer.iterations]),
            metrics={name: np.concatenate([metrics.get(name, none) for metrics, none in both]) for name in names},
            task_returns=np.concatenate([self.task_returns, newer.task_returns]),
            by_class=[*self.by_class, *newer.by_class],
            task_classes=None
            if self.task_classes is None or newer.task_classes is None
            else np.concatenate([self.task_classes, newer.task_classes]),
        )


def load_history(run: Run, iterations: Sequence[int] | None = None, *, on_progress: Progress = unseen) -> History:
    """Read the learning history of a run from its tables, for some complete iterations or all."""
    # Read once, since a run in training grows meanwhile.
    chosen = run.iterations if iterations is None else iterations
    if not chosen:
        raise UsageError(
            f"{run.path} has no complete iteration, so there is nothing to report yet; "
            f"continue with: metaloom resume {argument(run.path)}"
        )
    classes, history = classes_of(run), None
    # In blocks, since rows of episodes take far more memory than the result.
    for first in range(0, len(chosen), _BLOCK):
        on_progress(first, len(chosen))
        block = chosen[first : first + _BLOCK]
        episodes = run.episodes(block)
        by_class, task_classes = ({}, None) if classes is None else episode_classes(episodes, classes)
        newer = History(
            iterations=np.asarray(block),
            metrics=metric_columns(run.metrics(block)),
            task_returns=_task_returns(episodes, len(block)),
            by_class=[*by_class.values()],
            task_classes=task_classes,
            classes=classes,
        )
        history = newer if history is None else history.followed_by(newer)
    assert history is not None
    return history


def _over_training(
    history: History,
    section: str,
    name: str,
    title: str,
    y_label: str,
    series: Iterable[Series],
    note: str,
    band: str = "",
    *,
    wide: bool = False,
) -> Chart:
    """Make a chart of lines over the environment steps of training."""
    x, panels = history.metrics.get("env_steps", history.iterations), (Panel("", tuple(series)),)
    about = (name, section, "lines", title, STEPS, y_label, note, band, x, panels)
    chart = Chart(*about, iterations=history.iterations, wide=wide)
    return explain_gaps(chart) if band == ERROR_BAND else chart


def learning_chart(name: str, history: History) -> Chart:
    """Make the chart of average returns before and after adaptation.

    With `count_alike`, the average is class-balanced, which removes the effect of the draw of classes.
    """
    last, is_balanced, series = history.last_step, count_alike(history.by_class), list[Series]()
    for k, color in shown_steps(last).items():
        label = adaptation_label(k, last)
        # Bands only for the first and last line, since more would overlap.
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
    return _over_training(history, "Return", "learning_curve", title, y_label, series, note, band, wide=True)


def class_lines(history: History) -> Iterator[Chart]:
    """Yield the average returns by class of task, after and before adaptation."""
    last, names = history.last_step, history.by_class[0][0].names if history.by_class else ()
    for k in sorted({last, 0}, reverse=True) if names else ():
        title = f"Return by class of task, {adaptation_label(k, last)}" if last else "Return by class of task"
        name = "returns_by_class" if k == last else "returns_by_class_before"
        series = (
            estimates_series(label, class_color(c), [steps[k].estimates[c] for steps in history.by_class])
            for c, label in enumerate(names)
        )
        y_label, section = "average episode return", "By class of task"
        yield _over_training(history, section, name, title, y_label, series, CLASS_NOTE, ERROR_BAND)


def metric_columns(table: pa.Table) -> dict[str, Array]:
    """Return the columns of a table of metrics, each [I] float64."""
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


def success_lines(history: History) -> Iterator[Chart]:
    """Yield the share of successful episodes, if the environment reports success."""
    note = f"Episodes with at least one step that the environment reported as success{steps_note(history.last_step)}."
    steps = _of_steps(history, "success_rate")
    yield from _of_metrics(history, "Success", "success_rate", "Success rate", "share of episodes", steps, note)


def trial_lines(history: History) -> Iterator[Chart]:
    """Yield the returns of trials' first and last episodes, if trials have several."""
    first, last = (history.metrics.get(name) for name in TRIAL_RETURNS)
    if first is None or last is None or np.array_equal(first, last, equal_nan=True):
        return
    note = "Over all trials of an iteration; the gap is what the policy gains by remembering earlier episodes."
    ends: dict[str, tuple[str, str]] = dict(
        zip(TRIAL_RETURNS, (("first episode", BEFORE), ("last episode", AFTER)), strict=True)
    )
    title = "First and last episode of a trial"
    yield from _of_metrics(history, "Trials", "trial_returns", title, "average episode return", ends, note)


def optimization_lines(history: History) -> Iterator[Chart]:
    """Yield curves of the updates, if the algorithm has such metrics."""
    shown = steps_note(history.last_step)
    gained = "; the gap is what the update gained on them" if "loss_before" in history.metrics else ""
    norm = {"meta_gradient_norm": ("meta-gradient", AFTER)}
    noise = (
        "Norm of the meta-gradient",
        norm,
        "How much of it is noise a run records with algorithm.gradient_noise=true.",
    )
    if "meta_gradient_standard_error" in history.metrics:
        error = {"meta_gradient_standard_error": ("its standard error over tasks", BEFORE)}
        note = "Where the norm is no larger than its standard error, other tasks would have led elsewhere."
        noise = ("Signal and noise of the meta-gradient", {**norm, **error}, note)
    charts = (
        (
            *("kl_divergence", "KL divergence of the update", "KL divergence (nats)"),
            {"inner_kl": ("before adaptation (inner)", BEFORE), "outer_kl": ("after adaptation (outer)", AFTER)},
            "How far an iteration's update moved the policy from the one that collected its episodes.",
        ),
        (
            *("entropy", "Policy entropy", "entropy (nats)", _of_steps(history, "entropy")),
            f"Falls as the policy grows certain of its actions{shown}.",
        ),
        (
            *("loss", "Loss of the update", "surrogate loss"),
            {"loss_before": ("before the update", BEFORE), "loss_after": ("after the update", AFTER)},
            f"On the iteration's episodes{gained}.",
        ),
        ("meta_gradient", noise[0], "norm", noise[1], noise[2]),
        (
            *("gradient_norm", "Norm of the gradient", "norm"),
            {"gradient_norm": ("of the loss", AFTER), "q_gradient_norm": ("of the value function's loss", BEFORE)},
            "Of the updates of an iteration, before any clipping.",
        ),
        (
            *("meta_gradient_agreement", "Agreement of two halves of the tasks", "cosine of their meta-gradients"),
            {"meta_gradient_split_cosine": ("cosine", AFTER)},
            "1: both halves lead the same way; around 0: the direction of the update is noise.",
        ),
        (
            *("explained_variance", "Explained variance of the baseline", "share of variance"),
            _of_steps(history, "explained_variance"),
            f"1: the baseline predicts the returns exactly; 0: no better than their mean{shown}.",
        ),
    )
    for name, title, y_label, lines, note in charts:
        yield from _of_metrics(history, "Optimization", name, title, y_label, lines, note)


def _of_steps(history: History, metric: str) -> dict[str, tuple[str, str]]:
    last = history.last_step
    return {f"step_{k}.{metric}": (adaptation_label(k, last), color) for k, color in shown_steps(last).items()}


def _of_metrics(
    history: History, section: str, name: str, title: str, y_label: str, lines: Mapping[str, tuple[str, str]], note: str
) -> Iterator[Chart]:
    """Yield the lines of metrics, name -> (label, colour), if the run has any of them."""
    series = tuple(  # skip a chart without lines
        Series(label, color, history.metrics[metric])
        for metric, (label, color) in lines.items()
        if metric in history.metrics
    )
    if series:
        yield _over_training(history, section, name, title, y_label, series, note)


def stored_evaluations(run: Run) -> dict[int, Evaluation]:
    """Read a run's evaluations during training, by the iteration that they follow."""
    kept = (run.stages.in_group("evaluation", i) for i in run.iterations)
    return {ref.iteration: run[ref.iteration].evaluation() for ref in kept if ref is not None and run.contains(ref)}


def evaluation_lines(
    name: str, evaluations: Mapping[int, Evaluation], env_steps: Array, classes: Classes | None
) -> Iterator[Chart]:
    """Yield the test returns of evaluations during training.

    First interquartile means by number of adaptation steps; then, with classes, class means after the last step.
    """
    found = [*evaluations.values()]
    last, summaries, series = found[0].adaptation_steps, [*map(summarize_steps, found)], list[Series]()
    for k, color in shown_steps(last).items():
        line, band = interquartile_means([steps[k] for steps in summaries])
        # Bands only for the first and last line, since more would overlap.
        label = adaptation_label(k, last) if last else "test return"
        series.append(Series(label, color, line, band if k in (0, last) else None))
    title, x_label, y_label = f"Evaluation of {name}", f"{STEPS} of training", "return of test episodes"
    note, panels = INTERVAL_NOTE + steps_note(last), (Panel("", tuple(series)),)
    averages = f"{y_label} (interquartile mean)"
    about = ("evaluation", "Evaluation", "lines", title, x_label, averages, note, INTERVAL, env_steps, panels)
    chart = Chart(*about, iterations=np.array([*evaluations]), wide=True)
    yield chart
    if classes is None:
        return
    returns = [summarize_classes(evaluation, classes)[-1] for evaluation in found]
    by_class = (
        estimates_series(name, class_color(c), [of_classes.estimates[c] for of_classes in returns])
        for c, name in enumerate(returns[0].names)
    )
    words = {"name": "evaluation_by_class", "title": f"{title} by class of task", "y_label": y_label}
    words |= {"note": CLASS_NOTE, "band": ERROR_BAND}
    yield explain_gaps(replace(chart, **words, panels=(Panel("", tuple(by_class)),)))


def interquartile_means(steps: list[AdaptationSummary]) -> tuple[Array, tuple[Array, Array]]:
    """Return interquartile means, and the ends of their intervals."""
    low, high = np.array([s.iqm_low for s in steps]), np.array([s.iqm_high for s in steps])
    return np.array([s.iqm_return for s in steps]), (low, high)


def per_shot_chart(title: str, evaluation: Evaluation) -> Chart:
    """Make the chart of test returns against the number of adaptation episodes."""
    steps, n = summarize_steps(evaluation), evaluation.episodes_per_step
    note = f"an adaptation step after every {'episode' if n == 1 else f'{n} episodes'}; {INTERVAL_NOTE}"
    series = (
        Series("interquartile mean", AFTER, *interquartile_means(steps)),
        Series("mean", BEFORE, np.array([step.average_return for step in steps])),
    )
    episodes = np.array([step.adaptation_episodes for step in steps], np.float64)
    return Chart(
        *("evaluation_adaptation", "Evaluation", "lines", title, "adaptation episodes per task"),
        "return of test episodes",
        note if evaluation.adaptation_steps else INTERVAL_NOTE,
        INTERVAL,
        episodes,
        (Panel("", series),),
    )
