"""The figure of `metaloom compare --plot`."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metaloom.flows.views import charts
from metaloom.flows.views.series import AFTER, BEFORE, BETWEEN, INK, Series
from metaloom.pipeline.comparison.groups import Band, Estimate

if TYPE_CHECKING:
    from metaloom.flows.results.comparison import Comparison

COLORS = (AFTER, BEFORE, *BETWEEN, INK)
MOST_PAIRS = 12


def comparison_figure(found: "Comparison") -> Figure:
    """Draw four panels: interquartile means, curves over environment steps, profiles, probabilities of improvement."""
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    figure.suptitle(
        f"{found.conditions}\n{found.intervals}", x=0.01, ha="left", fontsize=9, color="#57606a", parse_math=False
    )
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
