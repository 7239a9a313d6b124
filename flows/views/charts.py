"""Drawing of charts as matplotlib figures, without a display."""

import base64
import io
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from metaloom.flows.errors import UsageError
from metaloom.flows.views.series import INK, Chart, Series
from metaloom.pipeline.types import Array
from metaloom.storage.errors import system_errors

if mpl.matplotlib_fname() == "matplotlibrc":
    # Ignore a matplotlibrc in the working directory, which may be somebody else's, but not the user's own.
    mpl.rcdefaults()

GRID = "#e6e8eb"
WIDE, NARROW = (8.6, 4.4), (6.4, 3.4)
MARKED_POINTS = 40  # maximum number of points on a line with markers
MOST_COLUMNS, MOST_INSIDE = 4, 3
BESIDE: dict[str, Any] = dict(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))
"""Arguments that place a legend to the right of its chart."""


class Drawing(Figure):
    """Matplotlib figure that notebooks display regardless of the backend."""

    def _repr_png_(self) -> bytes:
        return rendered(self, "png")


def draw(chart: Chart, *, titled_elsewhere: bool = False) -> Drawing:
    """Draw a chart as a matplotlib figure, without its note if it is `titled_elsewhere` or consists of bars or layers.

    Large x values are shown in thousands or millions.
    """
    if titled_elsewhere or chart.kind in ("bars", "layers"):
        chart = replace(chart, note="")
    panel, *others = chart.panels
    if others:
        return _panel_chart(chart)
    series = panel.series
    size = (6.4, max(2.2, 0.36 * len(series) + 1.3)) if chart.kind == "bars" else WIDE if chart.wide else NARROW
    figure = Drawing(figsize=size, layout="constrained")
    axes, note = figure.add_subplot(), _wrapped(chart.note, figure)
    # parse_math is off wherever user text may occur, since a "$" in a name must not start mathematics.
    pad = 8 + 12 * (note.count("\n") + 1 if note else 0)
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=pad, parse_math=False)
    if note:
        axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#57606a", parse_math=False)
    style(axes)
    x, unit = (chart.x, "") if chart.diagonal or chart.kind == "layers" else _scaled(chart.x)
    axes.set_xlabel(chart.x_label + unit)
    axes.set_ylabel(chart.y_label)
    {"lines": _lines, "points": _points, "layers": _layers, "bars": _bars}[chart.kind](axes, chart, series, x)
    return figure


def _lines(axes: Axes, chart: Chart, series: Sequence[Series], x: Array) -> None:
    plot_lines(axes, x, series)
    if len(x) and np.ptp(x) < MARKED_POINTS and (x == np.round(x)).all():
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # integers only
    axes.margins(x=0.02)
    handles, labels = _legend(axes, series, chart.band)
    # Omit the legend of a single line. Place the legend of many lines beside the chart, since it would cover them.
    if len(handles) > MOST_INSIDE:
        plain_legend(axes, handles, labels, **BESIDE)
    elif len(handles) > 1:
        plain_legend(axes, handles, labels, frameon=False, fontsize=9, labelcolor=INK)


def plot_lines(axes: Axes, x: Array, series: Sequence[Series]) -> None:
    """Plot lines with their bands, and with markers if there are few points."""
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


def _points(axes: Axes, chart: Chart, series: Sequence[Series], x: Array) -> None:
    for each in series:
        dots = 16 if chart.diagonal else 5
        axes.scatter(x, each.values, s=dots, color=each.color, label=each.label, alpha=0.7, linewidths=0)
    if chart.diagonal:
        middle = float(np.nanmean(x))
        axes.set_aspect("equal", adjustable="datalim")
        axes.axline((middle, middle), slope=1, color="#8c959f", linewidth=1, linestyle="--", zorder=0)
    if len(series) > 1:
        plain_legend(axes, axes.collections, [each.label for each in series], markerscale=2, **BESIDE)


def _panel_chart(chart: Chart) -> Drawing:
    """Draw a chart with several panels that share their axes, up to four in a row."""
    count = len(chart.panels)
    columns = min(count, MOST_COLUMNS)
    rows = -(-count // columns)
    figure = Drawing(figsize=(max(2.5 * columns, 5.0), 2.3 * rows + 0.9), layout="constrained")
    cells = figure.subplots(rows, columns, sharex=True, sharey=True).ravel()
    x, unit = _scaled(chart.x)
    for axes, panel in zip(cells, chart.panels, strict=False):
        plot_lines(axes, x, panel.series)
        axes.set_title(panel.title, fontsize=9.5, color=INK, parse_math=False)
        style(axes)
    for axes in cells[count:]:
        axes.set_visible(False)
    title = f"{chart.title}\n{_wrapped(chart.note, figure)}" if chart.note else chart.title
    figure.suptitle(title, fontsize=10, color=INK, parse_math=False)
    for axes in cells[count - columns : count]:
        axes.set_xlabel(chart.x_label + unit, fontsize=8.5)
        axes.tick_params(labelbottom=True)
    figure.supylabel(chart.y_label, fontsize=9.5, color=INK)
    handles, labels = _legend(cells[0], chart.panels[0].series, chart.band)
    look = {"frameon": False, "fontsize": 9, "labelcolor": INK, "ncols": 3, "loc": "outside lower center"}
    plain_legend(figure, handles, labels, **look)
    return figure


def _layers(axes: Axes, chart: Chart, series: Sequence[Series], x: Array) -> None:
    """Plot stacked layers over iterations."""
    values = [np.nan_to_num(layer.values) for layer in series]
    colors = [layer.color for layer in series]
    if len(x) > 1:
        handles: list[Any] = axes.stackplot(x, *values, colors=colors, linewidth=0)
    else:
        drawn = zip(colors, values, np.cumsum([np.zeros_like(values[0]), *values[:-1]], axis=0), strict=True)
        handles = [axes.bar(x, value, bottom=base, width=0.4, color=color) for color, value, base in drawn]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    # Reversed, so that the legend reads from top to bottom as the layers do.
    plain_legend(axes, handles[::-1], [layer.label for layer in series][::-1], **BESIDE)


def _bars(axes: Axes, chart: Chart, series: Sequence[Series], x: Array) -> None:
    """Plot horizontal bars from top to bottom, each followed by its text."""
    values, places = np.concatenate([bar.values for bar in series]), range(len(series))
    axes.barh(places, values, color=[bar.color for bar in series], height=0.66)
    look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK}
    for place, value, text in zip(places, values, chart.texts, strict=True):
        axes.annotate(text, (value, place), xytext=(5, 0), textcoords="offset points", **look)
    axes.set_yticks(places, [bar.label for bar in series], parse_math=False)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    # Leave room for the texts.
    axes.set_xlim(0, max(float(values.max(initial=0)) * 1.28, 1e-6))


def plain_legend(owner: Axes | Figure, handles: Sequence[Any], labels: Sequence[str], **look: Any) -> None:
    """Add a legend that shows labels literally: "$" does not start math mode, and a leading "_" hides nothing."""
    legend = owner.legend(handles, [str(place) for place in range(len(labels))], **look)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


def style(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#8c959f")
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)


def rendered(figure: Figure, kind: str, dpi: int = 160) -> bytes:
    """Return the bytes of a figure as PNG, SVG, or PDF with fonts that journals accept."""
    buffer = io.BytesIO()
    # Without a date and with fixed ids, the same run gives the same file.
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {"Software": None})
    with mpl.rc_context({"svg.hashsalt": "metaloom", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, metadata=metadata, facecolor="white", dpi=dpi)
    return buffer.getvalue()


def svg_data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI, which an HTML page can embed as an image that cannot run scripts."""
    return "data:image/svg+xml;base64," + base64.b64encode(rendered(figure, "svg")).decode()


def _wrapped(note: str, figure: Figure) -> str:
    """Return a note with line breaks, so that it fits above the figure's axes."""
    return textwrap.fill(note, int(14 * figure.get_figwidth()))


def _scaled(x: Array) -> tuple[Array, str]:
    largest = float(np.max(x, initial=0))
    if largest >= 1e6:
        return x / 1e6, " (millions)"
    if largest >= 1e4:
        return x / 1e3, " (thousands)"
    return x, ""


def check_plot_file(path: Path) -> None:
    """Raise UsageError if a plot cannot be written to this file."""
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir() or path.is_dir():
        raise UsageError(f"plot file {str(path)!r}: expected a .png, .svg or .pdf file in an existing folder")


def write_plot(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, SVG or PDF, depending on the suffix of the path."""
    needed = "free space and permission to write a plot"
    with system_errors(path, required=needed, action="Free space, or choose another file"):
        path.write_bytes(rendered(figure, path.suffix[1:]))
