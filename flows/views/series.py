"""Charts as data, and the colors shared by all charts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from metaloom.flows.formatting import finite
from metaloom.pipeline.estimation.statistics import ClassEstimate
from metaloom.pipeline.types import Array

# Okabe and Ito's palette for color-blind readers: orange before adaptation, blue after it.
BEFORE, AFTER = "#d55e00", "#0072b2"
INK = "#24292f"
BETWEEN = ("#cc79a7", "#009e73", "#e69f00", "#56b4e9")
MOST_STEPS = 2 + len(BETWEEN)  # maximum number of inner steps in a chart; PEARL has one per context episode
CLASS_COLORS = (*BETWEEN[1::-1], *BETWEEN[2:], "#8250a8", "#57606a")
CLASS_NOTE = "line: mean over the tasks of a class; band: ± 1 standard error over tasks"
ERROR_BAND = "± 1 standard error"
STAGE_COLORS = {
    **{"tasks": "#8c959f", "rollouts_{step}": "#0072b2", "samples_{step}": "#009e73", "adapted_{step}": "#e69f00"},
    **{"memory_fill": "#56b4e9", "minibatches": "#009e73", "learner": "#8250a8", "evaluation": "#cc79a7"},
}
"""Colors of stages, keyed by the group that contains their output."""
GAP_NOTE = "; no band where a class had only one task, and no line where it had none"


@dataclass(frozen=True)
class Series:
    """Series of a chart: a line, a layer, a bar or a group of points."""

    label: str
    color: str  # color as #rrggbb
    values: Array  # y values at the points of the chart's x axis, [n]; NaN leaves a gap
    band: tuple[Array, Array] | None = None  # lower and upper edges of a shaded band, [n] each


@dataclass(frozen=True)
class Panel:
    """Series that share their axes. The title above them is empty if the chart has only one panel."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Chart:
    """Chart as data, independent of how it is drawn."""

    name: str  # name of the chart's file, and of the Python method that draws the chart
    section: str  # heading under which a page shows it
    kind: Literal["lines", "points", "layers", "bars"]  # layers are stacked; bars have one value per series
    title: str
    x_label: str
    y_label: str
    note: str  # meaning of lines and bands, and what to look for
    band: str  # name of the bands in the legend; empty for none
    x: Array  # x coordinate of each point, shared by all series, [n]
    panels: tuple[Panel, ...]
    iterations: Array | None = None  # iteration of each point, [n]; None if points have no iteration
    texts: tuple[str, ...] = ()  # text after each bar
    diagonal: bool = False  # True to draw the line y = x for comparison
    wide: bool = False  # True if the chart spans the page


def alone(series: Iterable[Series]) -> tuple[Panel, ...]:
    """Wrap series in a single panel, as a one-element tuple."""
    return (Panel("", tuple(series)),)


def estimates_series(label: str, color: str, estimates: Sequence[ClassEstimate]) -> Series:
    """Return a line through the mean estimates with a band of ± 1 standard error."""
    means, errors = (np.array(column) for column in zip(*estimates, strict=True))
    return Series(label, color, means, (means - errors, means + errors))


def explain_gaps(chart: Chart) -> Chart:
    """Return the chart, with a note about the gaps in its bands if there are any."""
    bands = [series.band for panel in chart.panels for series in panel.series if series.band is not None]
    gaps = any(np.isnan(band).any() for band in bands)
    return replace(chart, note=chart.note + GAP_NOTE) if gaps else chart


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON data; a gap in a line is null."""
    return {
        **vars(chart),
        "x": numbers(chart.x),
        "iterations": None if chart.iterations is None else chart.iterations.tolist(),
        "panels": [
            {"title": panel.title, "series": [_series_data(series) for series in panel.series]}
            for panel in chart.panels
        ],
    }


def _series_data(series: Series) -> dict[str, Any]:
    low, high = (None, None) if series.band is None else map(numbers, series.band)
    return {"label": series.label, "color": series.color, "values": numbers(series.values), "low": low, "high": high}


def numbers(values: Array) -> list[float | None]:
    """Convert values to JSON numbers with seven digits, enough for a curve. Non-finite values become None."""
    return [finite(float(f"{value:.7g}")) for value in np.asarray(values, np.float64).tolist()]


def evenly_spaced(count: int, most: int) -> Array:
    """Return up to `most` evenly spaced indices into a sequence of length `count`, including both ends, [n]."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def shown_steps(last: int) -> dict[int, str]:
    """Return the inner steps from 0 to `last` that charts show, mapped to their colors.

    If there are more steps than colors, charts show the first, the last and evenly spaced ones in between.
    """
    first, *between, end = evenly_spaced(last + 1, MOST_STEPS).tolist() if last else (0, 0)
    return {first: BEFORE, **dict(zip(between, BETWEEN, strict=False)), end: AFTER}


def steps_note(last: int) -> str:
    """Return a note about inner steps that are not shown; "" if all are."""
    if last < MOST_STEPS:
        return ""
    return f"; of inner steps 0 to {last}, the first, the last and {len(BETWEEN)} in between are shown"


def class_color(c: int) -> str:
    """Return the color of the c-th task class, which is the same in all charts."""
    # Excludes the colors for returns before and after adaptation.
    return CLASS_COLORS[c % len(CLASS_COLORS)]


def stage_color(group: str, step: int) -> str:
    """Return the color of a stage whose output is in this group; later inner steps have lighter colors."""
    color, white = STAGE_COLORS.get(group, INK), min(0.4 * step, 0.8)
    parts = (int(color[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
