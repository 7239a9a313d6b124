import base64
import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from metaloom.flows.errors import UsageError
from metaloom.flows.views import charts
from metaloom.flows.views.series import (
    AFTER,
    BEFORE,
    INK,
    STAGE_COLORS,
    Chart,
    Panel,
    Series,
    alone,
    class_color,
    stage_color,
)


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
    [
        (9_999, "steps", 9_999),
        (10_000, "steps (thousands)", 10),
        (999_000, "steps (thousands)", 999),
        (1_000_000, "steps (millions)", 1),
        (32_000_000, "steps (millions)", 32),
    ],
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
    chart = Chart("c", "s", drawn, STRANGE[0], "x", "y", STRANGE[0], "", x, panels, texts=("",) * count)
    figure = charts.draw(chart)
    assert charts.rendered(figure, "png").startswith(b"\x89PNG")
    (axes, *_), legends = figure.axes, figure.legends or [figure.axes[0].get_legend()]
    texts = axes.get_yticklabels() if kind == "bars" else legends[0].get_texts()
    assert sorted(text.get_text() for text in texts) == sorted(STRANGE[:count])


@pytest.mark.parametrize("n", [1, 2, 60])
def test_stacked_layers_add_up_for_any_number_of_iterations(n):
    layers = [Series("a", "C0", np.full(n, 1.0)), Series("b", "C1", np.full(n, 2.0))]
    chart = Chart("", "", "layers", "t", "iteration", "seconds", "note", "", np.arange(n), alone(layers))
    axes = charts.draw(chart).axes[0]
    assert [text.get_text() for text in axes.texts] == []
    assert axes.dataLim.ymax == 3.0
    assert axes.get_xlim() == ((0, n - 1) if n > 1 else (-0.2, 0.2))
    assert n == 1 or all(place == round(place) for place in axes.get_xticks())
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
    panels = tuple(
        Panel(f"class {n}", (replace(lines()[0], label=f"line {n}", color=f"C{n}", values=np.arange(5.0) * n),))
        for n in range(count)
    )
    figure = charts.draw(Chart("", "", "lines", "t", "steps", "return", "", "error", np.arange(5), panels))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [panel.title for panel in panels]
    grid = figure.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (rows, columns)
    # The lowest panel of each column has the label.
    assert [axes.get_xlabel() for axes in shown] == [""] * (count - columns) + ["steps"] * columns
    numbered = [axes.xaxis.get_tick_params()["labelbottom"] for axes in shown]
    assert numbered == [False] * (count - columns) + [True] * columns
    assert len({axes.get_xlim() + axes.get_ylim() for axes in shown}) == 1
    # The lines of all panels have the same names and colours, those of the first.
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["line 0", "error"]
    assert figure.legends[0].get_lines()[0].get_color() == "C0"
    assert figure.get_size_inches().tolist() == pytest.approx([2.5 * columns, 2.3 * rows + 0.9])


def test_bars_stand_in_the_given_order_from_the_top_with_their_notes():
    bars = [Series(name, "C0", np.array([value])) for name, value in (("first", 1.0), ("second", 2.0))]
    chart = Chart("", "", "bars", "t", "s", "", "note", "", np.zeros(1), alone(bars), texts=("1 s", "2 s"))
    figure = charts.draw(chart)
    (axes,) = figure.axes
    assert figure.get_size_inches().tolist() == [6.4, 2.2]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]
    assert axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == ["1 s", "2 s"]
    assert [(text.xy, text.xyann) for text in axes.texts] == [((1, 0), (5, 0)), ((2, 1), (5, 0))]
    assert axes.get_xlim() == (0, pytest.approx(1.28 * 2))
    many = [Series(str(n), "C0", np.zeros(1)) for n in range(10)]
    figure = charts.draw(replace(chart, panels=alone(many), texts=("",) * 10))
    assert figure.get_size_inches().tolist() == pytest.approx([6.4, 0.36 * 10 + 1.3])
    assert figure.axes[0].get_xlim() == (0, pytest.approx(1e-6))


@pytest.mark.parametrize(("wide", "size"), [(True, (8.6, 4.4)), (False, (6.4, 3.4))])
def test_a_chart_is_as_large_as_documents_expect_it(wide, size):
    chart = Chart("", "", "lines", "t", "x", "y", "", "", np.arange(3), alone(lines(3)), wide=wide)
    figure = charts.draw(chart)
    assert tuple(figure.get_size_inches()) == size
    if not wide:
        assert Image.open(io.BytesIO(charts.rendered(figure, "png"))).size == (160 * 6.4, 160 * 3.4)


@pytest.mark.parametrize(("note", "rows"), [("", 0), ("word", 1), ("x " * 80, 2)])
def test_a_title_stands_above_its_note_which_is_as_wide_as_its_chart(note, rows):
    figure = line_chart("Title", np.arange(3), "x", "y", lines(3), note=note)
    (axes,) = figure.axes
    shown = [text.get_text() for text in axes.texts]
    assert [text.count("\n") + 1 for text in shown] == [rows] * (rows > 0)
    # 14 characters fit into an inch, of 6.4.
    assert rows < 2 or shown[0].index("\n") == 89
    assert [text.get_position() for text in axes.texts] == [(0, 1.02)] * (rows > 0)
    figure.draw_without_rendering()  # which places the title
    (title,) = axes.findobj(lambda artist: isinstance(artist, Text) and artist.get_text() == "Title")
    _, above = title.get_transform().transform(title.get_position()) - axes.bbox.p1
    assert above * 72 / figure.dpi == pytest.approx(8 + 12 * rows)


def test_a_chart_has_its_note_unless_its_title_is_elsewhere():
    chart = Chart("", "", "lines", "t", "x", "y", "note", "", np.arange(3), alone(lines(3)))
    for elsewhere in (False, True):
        (axes,) = charts.draw(chart, titled_elsewhere=elsewhere).axes
        assert ["note" in text.get_text() for text in axes.texts] == [True] * (not elsewhere)


def test_few_points_are_marked_and_few_integers_have_no_fractions_between_them():
    for n in (40, 41):
        (axes,) = line_chart("t", np.arange(n), "x", "y", lines(n)).axes
        assert {line.get_marker() for line in axes.lines} == {"o" if n == 40 else ""}
        assert axes.get_xlim() == pytest.approx((-0.02 * (n - 1), 1.02 * (n - 1)))
    (whole,) = line_chart("t", np.arange(3), "x", "y", lines(3)).axes
    (parts,) = line_chart("t", np.arange(3) / 2, "x", "y", lines(3)).axes
    assert all(place == round(place) for place in whole.get_xticks())
    assert not all(place == round(place) for place in parts.get_xticks())


@pytest.mark.parametrize("count", [3, 4])
def test_a_legend_of_many_lines_is_beside_the_chart(count):
    series = [Series(f"line {n}", f"C{n}", np.arange(3.0)) for n in range(count)]
    figure = line_chart("t", np.arange(3), "x", "y", series)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend, inside = axes.get_legend().get_window_extent(), axes.bbox
    assert not axes.get_legend().get_frame_on()
    if count == 3:
        assert inside.x0 < legend.x0 < legend.x1 < inside.x1
    else:
        assert inside.x1 <= legend.x0 < legend.x1 <= figure.bbox.x1
        assert (legend.y0 + legend.y1) / 2 == pytest.approx((inside.y0 + inside.y1) / 2, abs=1)


def test_charts_have_the_letters_lines_and_points_of_their_style():
    look = dict[str, object]()

    def draw(kind, count, panels=1, **options):
        x = np.arange(1.0 if kind == "bars" else 2.0)
        series = tuple(Series(f"line {n}", f"C{n}", x, (x, x)) for n in range(count))
        chart = Chart("", "", kind, "t", "x", "y", "note", "band", x, (Panel("p", series),) * panels, **options)
        figure = charts.draw(chart)
        (legend,) = figure.legends or [axes.get_legend() for axes in figure.axes[:1] if axes.get_legend()] or [None]
        if legend is not None:
            look[f"{kind} {count} {panels}"] = legend.get_texts()[0].get_fontsize(), legend.get_frame_on()
        return figure, figure.axes[0], legend

    figure, axes, legend = draw("lines", 1)
    sizes = {text.get_text(): text.get_fontsize() for text in figure.findobj(Text)}
    assert {name: sizes[name] for name in ("t", "note", "x", "y", "line 0")} == {
        "t": 11, "note": 8.5, "x": 9.5, "y": 9.5, "line 0": 9
    }  # fmt: skip
    assert {label.get_fontsize() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())} == {9}
    assert [spine for spine, line in axes.spines.items() if line.get_visible()] == ["left", "bottom"]
    assert axes.get_axisbelow() is True
    assert axes.get_xgridlines()[0].get_linewidth() == 0.8
    (line,), (band,), (key,) = axes.lines, axes.collections, legend.get_patches()
    assert (line.get_linewidth(), line.get_markersize()) == (1.7, 3.2)
    for shaded in (band, key):
        assert (shaded.get_alpha(), np.max(shaded.get_linewidth())) == (0.16, 0)
    for diagonal, size in ((False, 5), (True, 16)):
        _, axes, legend = draw("points", 2, diagonal=diagonal)
        dots = axes.collections[0]
        assert (dots.get_sizes().tolist(), dots.get_alpha(), dots.get_linewidths().tolist()) == ([size], 0.7, [0])
        assert legend.legend_handles[0].get_sizes().tolist() == [4 * size]  # twice as wide
    (line,) = axes.lines
    assert (line.get_linewidth(), line.get_zorder()) == (1, 0)
    _, axes, _ = draw("layers", 2)
    assert {*axes.collections[0].get_linewidth()} == {0}
    _, axes, _ = draw("bars", 1, texts=("text",))
    assert (axes.patches[0].get_height(), axes.texts[0].get_fontsize()) == (0.66, 9)
    assert not axes.yaxis.get_tick_params()["gridOn"]
    figure, axes, legend = draw("lines", 2, panels=2)
    sizes = {text.get_text(): text.get_fontsize() for text in figure.findobj(Text)}
    assert {name: sizes[name] for name in ("t\nnote", "p", "x", "y")} == {"t\nnote": 10, "p": 9.5, "x": 8.5, "y": 9.5}
    assert look == {
        "lines 1 1": (9, False), "points 2 1": (8, False), "layers 2 1": (8, False), "lines 2 2": (9, False)
    }  # fmt: skip


def test_a_plot_is_a_file_of_a_known_kind_in_a_folder(tmp_path):
    (tmp_path / "folder.png").mkdir()
    for name in ("folder.png", "absent/curve.png", "curve.jpg", "curve"):
        with pytest.raises(UsageError, match="plot file"):
            charts.check_plot_file(tmp_path / name)


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
    # Of #0072b2, two fifths and four fifths of the way to white.
    assert colors[1:] == ["#66aad1", "#cce3f0"]
    assert stage_color("rollouts_{step}", 3) == colors[2]
    assert stage_color("own", 0) == INK


def test_six_classes_have_colours_of_their_own_and_others_those_again():
    colors = [class_color(c) for c in range(7)]
    assert len({*colors[:6], BEFORE, AFTER}) == 8
    assert colors[6] == colors[0]
