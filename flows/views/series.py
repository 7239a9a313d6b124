"""Lines of charts as data, and the colours that they have in every chart, whatever draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.estimation.class_returns import Estimate
from metaloom.pipeline.types import Array

# Okabe and Ito's palette, which colour-blind readers can tell apart. Before adaptation orange, after it blue.
BEFORE, AFTER = "#d55e00", "#0072b2"
BETWEEN = ("#cc79a7", "#009e73", "#e69f00", "#56b4e9")
CLASS_COLORS = (*BETWEEN[1::-1], *BETWEEN[2:], "#8250a8", "#57606a")
CLASS_NOTE = "line: mean over the tasks of a class; band: ± 1 standard error over tasks"
ERROR_BAND = "± 1 standard error"


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        color: as #rrggbb.
        values: [n], one per point of the chart's x axis; NaN leaves a gap.
        band: lower and upper edge of a shaded band around the line, each [n].
    """

    label: str
    color: str
    values: Array
    band: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Lines:
    """The lines of a chart, and the words that say what they are.

    Attributes:
        title: of the chart.
        y_label: what the lines measure.
        note: what line and band are.
        band: the band's name in the legend.
        series: the lines.
    """

    title: str
    y_label: str
    note: str
    band: str
    series: tuple[Series, ...]


def estimates_series(label: str, color: str, estimates: Sequence[Estimate]) -> Series:
    """Means with a band of ± 1 standard error."""
    means, errors = (np.array(column) for column in zip(*estimates, strict=True))
    return Series(label, color, means, (means - errors, means + errors))


def step_color(k: int, last: int) -> str:
    """Colour of inner step k of last, the same in all charts."""
    if k == last:
        return AFTER
    return BEFORE if k == 0 else BETWEEN[(k - 1) % len(BETWEEN)]


def class_color(c: int) -> str:
    """Colour of the c-th class of tasks, the same in all charts."""
    # None of those that stand for before and after adaptation.
    return CLASS_COLORS[c % len(CLASS_COLORS)]
