"""Evaluations of a run during training, as curves over it. Needs no torch."""

import numpy as np

from metaloom.flows.formatting import adaptation_label
from metaloom.flows.results.evaluation_summary import AdaptationSummary, summarize_classes, summarize_steps
from metaloom.flows.views.series import (
    CLASS_NOTE,
    ERROR_BAND,
    Lines,
    Series,
    class_color,
    estimates_series,
    explain_gaps,
    shown_steps,
    steps_note,
)
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import Run

INTERVAL_NOTE = "lines: averages over tasks of their mean test return; bands: 95 % bootstrap intervals"
INTERVAL = "95 % bootstrap interval"


def stored_evaluations(run: Run) -> dict[int, Evaluation]:
    """A run's evaluations during training, by the iteration that they follow."""
    kept = (run.stages.in_group("evaluation", i) for i in run.iterations)
    return {ref.iteration: run[ref.iteration].evaluation() for ref in kept if ref is not None and run.contains(ref)}


def training_lines(name: str, evaluations: list[Evaluation]) -> Lines:
    """Interquartile mean of the test return of every evaluation, after every number of adaptation steps."""
    last = evaluations[0].adaptation_steps
    summaries = [summarize_steps(evaluation) for evaluation in evaluations]
    series: list[Series] = []
    for k, color in shown_steps(last).items():
        line, band = interquartile_means([steps[k] for steps in summaries])
        # Between the first and the last a band would only cover the others.
        label = adaptation_label(k, last) if last else "test return"
        series.append(Series(label, color, line, band if k in (0, last) else None))
    y_label = "return of test episodes (interquartile mean)"
    note = INTERVAL_NOTE + steps_note(last)
    return Lines("evaluation", f"Evaluation of {name}", y_label, note, INTERVAL, tuple(series))


def training_lines_by_class(name: str, evaluations: list[Evaluation], classes: Classes) -> Lines:
    """Test return of every evaluation after the last adaptation step, by class of task."""
    returns = [summarize_classes(evaluation, classes)[-1] for evaluation in evaluations]
    series = (
        estimates_series(name, class_color(c), [by_class.estimates[c] for by_class in returns])
        for c, name in enumerate(returns[0].names)
    )
    title = f"Evaluation of {name} by class of task"
    return explain_gaps(
        Lines("evaluation_by_class", title, "return of test episodes", CLASS_NOTE, ERROR_BAND, tuple(series))
    )


def interquartile_means(steps: list[AdaptationSummary]) -> tuple[Array, tuple[Array, Array]]:
    """Interquartile means, and the ends of their intervals."""
    low, high = np.array([s.iqm_low for s in steps]), np.array([s.iqm_high for s in steps])
    return np.array([s.iqm_return for s in steps]), (low, high)
