"""Pictures of evaluations: the curve of one over adaptation, and of all of a run over training."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from metaloom.flows.errors import UsageError
from metaloom.flows.views import charts
from metaloom.flows.views.charts import CLASS_NOTE, ERROR_BAND, Series, estimates_series
from metaloom.flows.views.evaluation_summary import AdaptationSummary, summarize_classes, summarize_steps
from metaloom.flows.views.formatting import adaptation_label
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import Run

INTERVAL_NOTE = "lines: averages over tasks of their mean test return; bands: 95 % bootstrap intervals"
INTERVAL = "95 % bootstrap interval"
SUFFIXES = (".png", ".svg")


def check_plot_file(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done.

    Raises:
        UsageError: the name has another suffix, or there is no such folder.
    """
    if path.suffix not in SUFFIXES or not path.absolute().parent.is_dir():
        raise UsageError(f"found plot file {str(path)!r}; required a .png or .svg file in a folder that exists")


def write_plot(path: Path, figure: Figure) -> None:
    """Write a figure as PNG or SVG, as the suffix says."""
    path.write_bytes(charts.png_bytes(figure) if path.suffix == ".png" else charts.svg_bytes(figure))


def per_shot_curve(title: str, evaluation: Evaluation) -> Figure:
    """Test return against the number of episodes that a task's policy has adapted to."""
    steps = summarize_steps(evaluation)
    n = evaluation.episodes_per_step
    per_step = f"one adaptation step per {n} episode{'' if n == 1 else 's'}; " if evaluation.adaptation_steps else ""
    return charts.line_chart(
        title,
        np.array([step.adaptation_episodes for step in steps], np.float64),
        "adaptation episodes per task",
        "return of test episodes",
        [
            Series("interquartile mean", charts.AFTER, *_iqm(steps)),
            Series("mean", charts.BEFORE, np.array([step.average_return for step in steps])),
        ],
        note=per_step + INTERVAL_NOTE,
        band=INTERVAL,
        size=(8.6, 4.4),
    )


def stored_evaluations(run: Run) -> dict[int, Evaluation]:
    """A run's evaluations during training, by the iteration that they follow."""
    kept = (run.stages.in_group("evaluation", i) for i in run.iterations)
    return {ref.iteration: run[ref.iteration].evaluation() for ref in kept if ref is not None and run.contains(ref)}


def training_curve(name: str, env_steps: Array, evaluations: list[Evaluation]) -> Figure:
    """Interquartile mean of the test return after every number of adaptation steps, against environment steps."""
    last = evaluations[0].adaptation_steps
    summaries = [summarize_steps(evaluation) for evaluation in evaluations]
    series: list[Series] = []
    for k in range(last + 1):
        line, band = _iqm([steps[k] for steps in summaries])
        # Between the first and the last a band would only cover the others.
        label = adaptation_label(k, last) if last else "test return"
        series.append(Series(label, charts.step_color(k, last), line, band if k in (0, last) else None))
    return charts.line_chart(
        f"Evaluation of {name}",
        env_steps,
        "environment steps of training",
        "return of test episodes (interquartile mean)",
        series,
        note=INTERVAL_NOTE,
        band=INTERVAL,
        size=(8.6, 4.4),
    )


def training_curve_by_class(name: str, env_steps: Array, evaluations: list[Evaluation], classes: Classes) -> Figure:
    """Test return after the last adaptation step by class of task, against environment steps."""
    returns = [summarize_classes(evaluation, classes)[-1] for evaluation in evaluations]
    return charts.line_chart(
        f"Evaluation of {name} by class of task",
        env_steps,
        "environment steps of training",
        "return of test episodes",
        [
            estimates_series(name, charts.class_color(c), [by_class.estimates[c] for by_class in returns])
            for c, name in enumerate(returns[0].names)
        ],
        note=CLASS_NOTE,
        band=ERROR_BAND,
        size=(8.6, 4.4),
    )


def _iqm(steps: list[AdaptationSummary]) -> tuple[Array, tuple[Array, Array]]:
    low, high = np.array([s.iqm_low for s in steps]), np.array([s.iqm_high for s in steps])
    return np.array([s.iqm_return for s in steps]), (low, high)
