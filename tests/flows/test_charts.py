import base64
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from metaloom.flows.views import charts
from metaloom.flows.views.series import AFTER, BEFORE, STAGE_COLORS, Chart, Panel, Series, alone, stage_color


def lines(n: int = 5) -> list[Series]:
    rows = np.arange(2.0 * n).reshape(2, n)
    return [
        Series("before", BEFORE, rows[0], (rows[0] - 1, rows[0] + 1)),
        Series("after", AFTER, rows[1]),
    ]


def line_chart(title, x, x_label, y_label, series, note=""):
    return charts.draw(Chart("", "", "lines", title, x_label, y_label, note, "", x, alone(series)))


def test_a_line_chart_names_its_axes_its_lines_and_draws_the_bands():
    figure = line_chart("Title", np.arange(5), "environment steps", "return", lines(), note="what the band is")
    (axes,) = figure.axes
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == (
        "Title",
        "environment steps",
        "return",
    )
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after"]
    assert len(axes.collections) == 1
    low, high = axes.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == (-1, 5)
    assert "what the band is" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("largest", "label", "drawn"),
    [(9_000, "steps", 9_000), (80_000, "steps (thousands)", 80), (32_000_000, "steps (millions)", 32)],
)
def test_large_x_values_are_counted_in_thousands_or_millions(largest, label, drawn):
    figure = line_chart("t", np.array([0, largest]), "steps", "y", [Series("a", "C0", np.zeros(2))])
    assert figure.axes[0].get_xlabel() == label
    assert figure.axes[0].lines[0].get_xdata()[-1] == drawn


def test_a_single_line_needs_no_legend():
    figure = line_chart("t", np.arange(3), "x", "y", [Series("a", "C0", np.zeros(3))])
    assert figure.axes[0].get_legend() is None


def test_a_title_with_a_dollar_is_not_mathematics():
    figure = line_chart(r"a $\frac{", np.arange(3), "x", "y", lines(3))
    assert charts.rendered(figure, "png").startswith(b"\x89PNG")


STRANGE = (r"$\frac{1}{$", "_hidden", "a", "b", "c")
"""Names as environments may give their classes of tasks: mathematics that is none, and a name that matplotlib hides."""


@pytest.mark.parametrize("kind", ["lines", "points", "layers", "bars", "panels"])
@pytest.mark.parametrize("count", [2, 5])
def test_every_label_is_shown_as_it_is_whatever_it_is(kind, count):
    x = np.arange(1.0) if kind == "bars" else np.arange(3.0)
    series = tuple(Series(name, "#0072b2", x) for name in STRANGE[:count])
    panels = (Panel("", series),) if kind != "panels" else tuple(Panel(name, series) for name in STRANGE)
    drawn = "lines" if kind == "panels" else kind
    chart = Chart("c", "s", drawn, "t", "x", "y", "", "", x, panels, texts=("",) * count)
    figure = charts.draw(chart)
    assert charts.rendered(figure, "png").startswith(b"\x89PNG")
    (axes, *_), legends = figure.axes, figure.legends or [figure.axes[0].get_legend()]
    texts = axes.get_yticklabels() if kind == "bars" else legends[0].get_texts()
    assert sorted(text.get_text() for text in texts) == sorted(STRANGE[:count])


@pytest.mark.parametrize("n", [1, 2, 60])
def test_stacked_layers_add_up_for_any_number_of_iterations(n):
    layers = [Series("a", "C0", np.full(n, 1.0)), Series("b", "C1", np.full(n, 2.0))]
    chart = Chart("", "", "layers", "t", "iteration", "seconds", "", "", np.arange(n), alone(layers))
    axes = charts.draw(chart).axes[0]
    assert axes.dataLim.ymax == 3.0
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["b", "a"]
    # A single iteration has no width, so that each layer is a bar.
    assert (len(axes.collections), len(axes.patches)) == ((2, 0) if n > 1 else (0, 2))
    spans = [area.get_paths()[0].get_extents().intervaly.tolist() for area in axes.collections]
    assert spans + [[bar.get_y(), bar.get_y() + bar.get_height()] for bar in axes.patches] == [[0, 1], [1, 3]]


@pytest.mark.parametrize("diagonal", [False, True])
def test_points_stand_at_their_values_and_a_diagonal_joins_equal_ones(diagonal):
    x = np.array([0.0, 20_000.0])
    points = [Series("a", "C0", np.array([1.0, 2.0])), Series("b", "C1", np.array([3.0, 4.0]))]
    chart = Chart("", "", "points", "t", "before", "after", "", "", x, alone(points), diagonal=diagonal)
    axes = charts.draw(chart).axes[0]
    # Both axes of a diagonal have one scale.
    last = 20_000 if diagonal else 20
    assert [dots.get_offsets().tolist() for dots in axes.collections] == [[[0, 1], [last, 2]], [[0, 3], [last, 4]]]
    assert [(line.get_xy1(), line.get_slope()) for line in axes.lines] == [((10_000, 10_000), 1)] * diagonal
    assert (axes.get_aspect() == 1) is diagonal
    assert charts.draw(replace(chart, panels=alone(points[:1]))).axes[0].get_legend() is None


@pytest.mark.parametrize(("count", "rows", "columns"), [(2, 1, 2), (4, 1, 4), (6, 2, 4)])
def test_panels_stand_in_rows_of_four_that_share_their_axes(count, rows, columns):
    panels = tuple(Panel(f"class {n}", tuple(lines()[:1])) for n in range(count))
    figure = charts.draw(Chart("", "", "lines", "t", "steps", "return", "", "error", np.arange(5), panels))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [panel.title for panel in panels]
    grid = figure.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (rows, columns)
    # The lowest panel of each column has the label.
    assert [axes.get_xlabel() for axes in shown] == [""] * (count - columns) + ["steps"] * columns
    assert len({axes.get_xlim() + axes.get_ylim() for axes in shown}) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["before", "error"]
    width, height = figure.get_size_inches()
    assert width / columns >= 2.4
    assert height / rows >= 2.4


def test_bars_stand_in_the_given_order_from_the_top_with_their_notes():
    bars = [Series(name, "C0", np.array([value])) for name, value in (("first", 1.0), ("second", 2.0))]
    chart = Chart("", "", "bars", "t", "s", "", "", "", np.zeros(1), alone(bars), texts=("1 s", "2 s"))
    axes = charts.draw(chart).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]
    assert axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == ["1 s", "2 s"]


def test_the_same_chart_is_the_same_file():
    uris = [charts.svg_data_uri(line_chart("t", np.arange(5), "x", "y", lines())) for _ in range(2)]
    assert uris[0] == uris[1]
    assert b"<svg" in base64.b64decode(uris[0].partition(",")[2])


def test_charts_are_the_same_whatever_settings_of_matplotlib_lie_in_the_folder(tmp_path):
    code = (
        "import hashlib, numpy as np; from metaloom.flows.views import charts, series\n"
        "lines = [series.Series('a', '#000000', np.arange(5.0))]\n"
        "chart = series.Chart('', '', 'lines', 't', 'x', 'y', '', '', np.arange(5), series.alone(lines))\n"
        "print(hashlib.sha256(charts.rendered(charts.draw(chart), 'png')).hexdigest())"
    )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "matplotlibrc").write_text("axes.facecolor: red\nlines.linewidth: 20\nbackend: module://x\n")
    digests = [
        subprocess.run(
            [sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        for folder in (tmp_path, tmp_path / "theirs")
    ]
    assert digests[0] == digests[1]


def test_later_inner_steps_of_a_stage_have_a_lighter_colour_of_their_own():
    colors = [stage_color("rollouts_{step}", k) for k in range(3)]
    assert colors[0] == STAGE_COLORS["rollouts_{step}"]
    assert len(set(colors)) == 3
