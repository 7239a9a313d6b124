"""Charts of a run as matplotlib figures, drawn without a display."""

import base64
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from metaloom.flows.errors import UsageError
from metaloom.flows.views.series import Chart, Series
from metaloom.pipeline.types import Array
from metaloom.storage.errors import system_errors

if mpl.matplotlib_fname() == "matplotlibrc":
    # Ignore a matplotlibrc in the working folder, which may be somebody else's, but not the user's.
    mpl.rcdefaults()

INK, GRID = "#24292f", "#e6e8eb"
WIDE, NARROW = (8.6, 4.4), (6.4, 3.4)
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
"""Colours of stages by the group of their output."""

# Maximum number of points for markers on a line.
MARKED_POINTS = 40
MOST_COLUMNS, MOST_INSIDE = 4, 3
BESIDE: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "labelcolor": INK,
    "loc": "center left",
    "bbox_to_anchor": (1, 0.5),
}
"""Placement of a legend to the right of its chart."""


def stage_color(group: str, step: int) -> str:
    """Return the colour of a stage by the group of its output; later inner steps are lighter."""
    red, green, blue = to_rgb(STAGE_COLORS.get(group, INK))
    white = min(0.4 * step, 0.8)
    return to_hex((red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white))


class Drawing(Figure):
    """A figure that notebooks show with any backend."""

    def _repr_png_(self) -> bytes:
        return png_bytes(self)


def draw(chart: Chart, *, told_elsewhere: bool = False) -> Drawing:
    """Draw a chart. If its title and note are shown elsewhere, omit the note."""
    note, size = "" if told_elsewhere else chart.note, WIDE if chart.wide else NARROW
    series = chart.panels[0].series
    if chart.kind == "bars":
        values, colors = np.concatenate([bar.values for bar in series]), [bar.color for bar in series]
        return bar_chart(chart.title, [bar.label for bar in series], values, chart.texts, chart.x_label, colors)
    if chart.kind == "layers":
        return stacked_chart(chart.title, chart.x, chart.x_label, chart.y_label, series, size=size)
    if chart.kind == "points":
        return _point_chart(replace(chart, note=note), size)
    if len(chart.panels) > 1:
        return _panel_chart(replace(chart, note=note))
    labels = chart.x_label, chart.y_label
    return line_chart(chart.title, chart.x, *labels, series, note=note, band=chart.band, size=size)


def line_chart(
    title: str,
    x: Array,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    note: str = "",
    band: str = "",
    size: tuple[float, float] = NARROW,
) -> Drawing:
    """Draw lines over a shared x axis, large x values in thousands or millions. The legend explains `band`."""
    figure, axes = _figure(title, note, size)
    x, unit = _scaled(x)
    _plot(axes, x, series)
    if len(x) and np.ptp(x) < MARKED_POINTS and np.array_equal(x, np.round(x)):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # integers only
    axes.set_xlabel(x_label + unit)
    axes.set_ylabel(y_label)
    axes.margins(x=0.02)
    handles, labels = _legend(axes, series, band)
    # Omit a legend of one line; a legend of many would cover them.
    if len(handles) > MOST_INSIDE:
        plain_legend(axes, handles, labels, **BESIDE)
    elif len(handles) > 1:
        plain_legend(axes, handles, labels, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _plot(axes: Axes, x: Array, series: Sequence[Series]) -> None:
    marker = "o" if len(x) <= MARKED_POINTS else ""
    for line in series:
        if line.band is not None:
            axes.fill_between(x, *line.band, color=line.color, alpha=0.16, linewidth=0)
        axes.plot(x, line.values, color=line.color, label=line.label, linewidth=1.7, marker=marker, markersize=3.2)


def _legend(axes: Axes, series: Sequence[Series], band: str) -> tuple[list[Any], list[Any]]:
    handles, labels = list[Any](axes.lines), [line.label for line in series]
    if band and any(line.band is not None for line in series):
        handles.append(Patch(color=INK, alpha=0.16, linewidth=0))
        labels.append(band)
    return handles, labels


def _point_chart(chart: Chart, size: tuple[float, float]) -> Drawing:
    figure, axes = _figure(chart.title, chart.note, size)
    x, unit = (chart.x, "") if chart.diagonal else _scaled(chart.x)
    for series in chart.panels[0].series:
        dots = 16 if chart.diagonal else 5
        axes.scatter(x, series.values, s=dots, color=series.color, label=series.label, alpha=0.7, linewidths=0)
    if chart.diagonal:
        middle = float(np.nanmean(x))
        axes.set_aspect("equal", adjustable="datalim")
        axes.axline((middle, middle), slope=1, color="#8c959f", linewidth=1, linestyle="--", zorder=0)
    axes.set_xlabel(chart.x_label + unit)
    axes.set_ylabel(chart.y_label)
    if len(chart.panels[0].series) > 1:
        dots, labels = axes.collections, [series.label for series in chart.panels[0].series]
        plain_legend(axes, dots, labels, markerscale=2, **BESIDE)
    return figure


def _panel_chart(chart: Chart) -> Drawing:
    """Draw panels with the same axes, up to four in a row."""
    columns = min(len(chart.panels), MOST_COLUMNS)
    rows = -(-len(chart.panels) // columns)
    figure = Drawing(figsize=(max(2.5 * columns, 5.0), 2.3 * rows + 0.9), layout="constrained")
    cells = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    x, unit = _scaled(chart.x)
    for axes, panel in zip(cells, chart.panels, strict=False):
        _plot(axes, x, panel.series)
        axes.set_title(panel.title, fontsize=9.5, color=INK, parse_math=False)
        style(axes)
    for axes in cells[len(chart.panels) :]:
        axes.set_visible(False)
    title = f"{chart.title}\n{_wrapped(chart.note, figure)}" if chart.note else chart.title
    figure.suptitle(title, fontsize=10, color=INK, parse_math=False)
    for axes in cells[max(len(chart.panels) - columns, 0) : len(chart.panels)]:
        axes.set_xlabel(chart.x_label + unit, fontsize=8.5)
        axes.tick_params(labelbottom=True)
    figure.supylabel(chart.y_label, fontsize=9.5, color=INK)
    handles, labels = _legend(cells[0], chart.panels[0].series, chart.band)
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK, "ncols": 3}
    plain_legend(figure, handles, labels, loc="outside lower center", **look)
    return figure


def stacked_chart(
    title: str, x: Array, x_label: str, y_label: str, layers: Sequence[Series], *, size: tuple[float, float] = NARROW
) -> Drawing:
    """Draw layers that add up to a whole, over iterations."""
    figure, axes = _figure(title, "", size)
    values = [np.nan_to_num(layer.values) for layer in layers]
    colors, labels = [layer.color for layer in layers], [layer.label for layer in layers]
    if len(x) > 1:
        handles: list[Any] = axes.stackplot(x, *values, colors=colors, linewidth=0)
    else:
        bottom = np.cumsum([np.zeros_like(values[0]), *values[:-1]], axis=0)
        drawn = zip(colors, values, bottom, strict=True)
        handles = [axes.bar(x, value, bottom=base, width=0.4, color=color) for color, value, base in drawn]
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    # Reversed, so that the legend reads from top to bottom as the layers do.
    plain_legend(axes, handles[::-1], labels[::-1], **BESIDE)
    return figure


def bar_chart(
    title: str, labels: Sequence[str], values: Array, notes: Sequence[str], x_label: str, colors: Sequence[str]
) -> Drawing:
    """Draw horizontal bars from top to bottom, each followed by a note."""
    figure, axes = _figure(title, "", (6.4, max(2.2, 0.36 * len(labels) + 1.3)))
    places = np.arange(len(labels))
    axes.barh(places, values, color=colors, height=0.66)
    for place, value, note in zip(places, values, notes, strict=True):
        axes.annotate(
            note, (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    axes.set_yticks(places, labels, parse_math=False)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(x_label)
    # Room for the notes.
    axes.set_xlim(0, max(float(values.max(initial=0)) * 1.28, 1e-6))
    return figure


def plain_legend(owner: Axes | Figure, handles: Sequence[Any], labels: Sequence[str], **look: Any) -> None:
    """Add a legend that shows every label literally: no "$" starts mathematics, and a leading "_" hides none."""
    legend = owner.legend(handles, [str(place) for place in range(len(labels))], **look)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


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


def pdf_bytes(figure: Figure) -> bytes:
    """Render a figure as PDF, with fonts that journals take."""
    return _saved(figure, "pdf")


def svg_data_uri(figure: Figure) -> str:
    """Render a figure as an SVG data URI: an image that an HTML page can hold and that cannot run anything."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg_bytes(figure)).decode()


def _saved(figure: Figure, kind: str, dpi: int = 100) -> bytes:
    buffer = io.BytesIO()
    # No date and fixed ids: the same run gives the same file.
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {"Software": None})
    with mpl.rc_context({"svg.hashsalt": "metaloom", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, metadata=metadata, facecolor="white", dpi=dpi)
    return buffer.getvalue()


def _figure(title: str, note: str, size: tuple[float, float]) -> tuple[Drawing, Axes]:
    figure = Drawing(figsize=size, layout="constrained")
    axes, note = figure.add_subplot(), _wrapped(note, figure)
    # parse_math is off wherever a user's text may enter: a "$" in a name is a dollar.
    pad = 8 + 12 * (note.count("\n") + 1 if note else 0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=pad, parse_math=False)
    if note:
        axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#57606a", parse_math=False)
    style(axes)
    return figure, axes


def _wrapped(note: str, figure: Figure) -> str:
    """Break a note into lines that fit above the figure's axes."""
    return textwrap.fill(note, int(14 * figure.get_figwidth()))


def _scaled(x: Array) -> tuple[Array, str]:
    largest = float(np.max(x, initial=0))
    if largest >= 1e6:
        return x / 1e6, " (millions)"
    if largest >= 1e4:
        return x / 1e3, " (thousands)"
    return x, ""


WRITERS: dict[str, Callable[[Figure], bytes]] = {
    ".png": png_bytes,
    ".svg": svg_bytes,
    ".pdf": pdf_bytes,
}


def check_plot_file(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done."""
    if path.suffix not in WRITERS or not path.absolute().parent.is_dir() or path.is_dir():
        raise UsageError(f"found plot file {str(path)!r}; required a .png, .svg or .pdf file in a folder that exists")


def write_plot(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, SVG or PDF, as the suffix says."""
    with system_errors(
        path, required="room and permission to write a plot", action="Free space, or choose another file"
    ):
        path.write_bytes(WRITERS[path.suffix](figure))
