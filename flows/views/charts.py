"""Charts of a run as matplotlib figures, drawn without a display."""

import base64
import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from metaloom.flows.views.series import Series
from metaloom.pipeline.types import Array

INK, GRID = "#24292f", "#e6e8eb"
STAGE_COLORS = {
    "memory_fill": "#56b4e9",
    "tasks": "#8c959f",
    "rollouts_{step}": "#0072b2",
    "samples_{step}": "#009e73",
    "adapted_{step}": "#e69f00",
    "minibatches": "#009e73",
    "learner": "#8250a8",
    "evaluation": "#cc79a7",
}
"""Of stages, by the group that keeps their output."""

# Up to this many points a line also shows where they are.
MARKED_POINTS = 40


def stage_color(group: str, step: int) -> str:
    """Colour of a stage by the group that keeps its output; later inner steps are lighter."""
    red, green, blue = to_rgb(STAGE_COLORS.get(group, INK))
    white = min(0.4 * step, 0.8)
    return to_hex((red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white))


def line_chart(
    title: str,
    x: Array,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    note: str = "",
    band: str = "",
    size: tuple[float, float] = (6.4, 3.4),
) -> Figure:
    """Lines over a shared x axis; large x values are counted in thousands or millions. The legend tells `band`."""
    figure, axes = _figure(title, note, size)
    x, unit = _scaled(x)
    marker = "o" if len(x) <= MARKED_POINTS else ""
    for line in series:
        if line.band is not None:
            axes.fill_between(x, *line.band, color=line.color, alpha=0.16, linewidth=0)
        axes.plot(x, line.values, color=line.color, label=line.label, linewidth=1.7, marker=marker, markersize=3.2)
    axes.set_xlabel(x_label + unit)
    axes.set_ylabel(y_label)
    axes.margins(x=0.02)
    handles, labels = axes.get_legend_handles_labels()
    if band and any(line.band is not None for line in series):
        handles.append(Patch(color=INK, alpha=0.16, linewidth=0))
        labels.append(band)
    # A legend of one line repeats the title.
    if len(handles) > 1:
        axes.legend(handles, labels, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def stacked_chart(
    title: str,
    x: Array,
    x_label: str,
    y_label: str,
    layers: Sequence[Series],
    *,
    size: tuple[float, float] = (6.4, 3.4),
) -> Figure:
    """Layers that add up to a whole, over iterations."""
    figure, axes = _figure(title, "", size)
    values = [np.nan_to_num(layer.values) for layer in layers]
    colors, labels = [layer.color for layer in layers], [layer.label for layer in layers]
    if len(x) > 1:
        axes.stackplot(x, *values, colors=colors, labels=labels, linewidth=0)
    else:
        bottom = np.cumsum([np.zeros_like(values[0]), *values[:-1]], axis=0)
        for layer, value, base in zip(layers, values, bottom, strict=True):
            axes.bar(x, value, bottom=base, width=0.4, color=layer.color, label=layer.label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    handles, names = axes.get_legend_handles_labels()
    # Reversed, so that the legend reads from top to bottom as the layers do.
    axes.legend(
        handles[::-1],
        names[::-1],
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return figure


def bar_chart(
    title: str, labels: Sequence[str], values: Array, notes: Sequence[str], x_label: str, colors: Sequence[str]
) -> Figure:
    """Horizontal bars from top to bottom, each with a note behind it."""
    figure, axes = _figure(title, "", (6.4, max(2.2, 0.36 * len(labels) + 1.3)))
    places = np.arange(len(labels))
    axes.barh(places, values, color=colors, height=0.66)
    for place, value, note in zip(places, values, notes, strict=True):
        axes.annotate(
            note, (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(x_label)
    # Room for the notes.
    axes.set_xlim(0, max(float(values.max(initial=0)) * 1.28, 1e-6))
    return figure


def style(axes: Axes) -> None:
    """Give axes the look that all charts have."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#8c959f")
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)


def png_bytes(figure: Figure, dpi: int = 160) -> bytes:
    """Render a figure as PNG, by default sharp on dense screens."""
    return _saved(figure, "png", dpi=dpi)


def svg_bytes(figure: Figure) -> bytes:
    """Render a figure as SVG."""
    return _saved(figure, "svg")


def svg_data_uri(figure: Figure) -> str:
    """Render a figure as an SVG data URI: an image that an HTML page can hold and that cannot run anything."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg_bytes(figure)).decode()


def _saved(figure: Figure, kind: str, dpi: int = 100) -> bytes:
    buffer = io.BytesIO()
    # No date and fixed ids: the same run gives the same file.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "metaloom"}):
        figure.savefig(buffer, format=kind, metadata=metadata, facecolor="white", dpi=dpi)
    return buffer.getvalue()


def _figure(title: str, note: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    # parse_math is off wherever a user's text may enter: a "$" in a name is a dollar.
    axes.set_title(
        title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=20 if note else 8, parse_math=False
    )
    if note:
        axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#57606a", parse_math=False)
    style(axes)
    return figure, axes


def _scaled(x: Array) -> tuple[Array, str]:
    largest = float(np.max(x, initial=0))
    if largest >= 1e6:
        return x / 1e6, " (millions)"
    if largest >= 1e4:
        return x / 1e3, " (thousands)"
    return x, ""
