"""The report in a real browser, where there is one, opened as a file: it draws, and may do nothing else."""

import re

import numpy as np
import pytest
from browsing import NEEDS_BROWSER, look
from driving import open_page

from metaloom import storage
from metaloom.flows.views.history import load_history
from metaloom.flows.views.page import Page, plotly_file
from metaloom.flows.views.report import write_report
from metaloom.flows.views.run_charts import run_charts
from metaloom.flows.views.series import Chart, Panel, Series

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]

NAME = "<b onclick=alert(1)>bold"


@pytest.fixture(scope="module")
def run(tmp_path_factory, copy_tiny_run):
    path = tmp_path_factory.mktemp("reported") / NAME
    copy_tiny_run(path)
    return storage.open_run(path)


def test_a_report_draws_every_chart_without_a_word_from_the_browser(run, tmp_path):
    page, said = look(write_report(run, tmp_path / "report").html.as_uri(), tmp_path / "browser")
    assert said == []
    charts = run_charts(run, load_history(run))
    drawn = re.findall(r'<div id="chart-(\w+)"[^>]* class="js-plotly-plot"', page)
    assert drawn == [chart.name for chart in charts]
    assert page.count('class="main-svg"') >= 2 * len(charts)
    assert 'id="trouble" hidden=""' in page
    assert "<b onclick" not in page
    assert not re.search(
        '<a [^>]*class="modebar-btn', page
    )  # nothing hovers in this browser, and buttons would lie on legends


def test_a_report_breaks_no_rule_of_accessibility(run, tmp_path):
    with open_page(write_report(run, tmp_path / "report").html.as_uri(), tmp_path / "browser") as page:
        page.wait("[...document.querySelectorAll('.chart > div')].every((e) => e.querySelector('.nsewdrag'))")
        assert page.violations() == []


def test_a_chart_of_more_points_than_a_call_takes_arguments_is_drawn(tmp_path):
    x = np.arange(130_000.0)  # V8 takes 125 thousand
    panels = (Panel("", (Series("tasks", "#0072b2", np.where(x < 2, x, np.nan)),)),)  # two of them are drawn
    chart = Chart("many", "Tasks", "points", "t", "x", "y", "", "", x, panels, diagonal=True)
    plotly = plotly_file().read_text("utf-8")
    html = tmp_path / "many.html"
    html.write_text(Page("t", "", [], chart, [], {}, plotly=plotly).html(), "utf-8")
    page, _ = look(html.as_uri(), tmp_path / "browser")
    assert 'id="trouble" hidden=""' in page


def test_a_script_that_the_report_does_not_hold_may_not_run(run, tmp_path):
    html = write_report(run, tmp_path / "report").html
    text = html.read_text("utf-8").replace("<main>", "<main><script>document.title = 'taken'</script>")
    html.write_text(text.replace("<h1>", '<img src="https://example.org/x.png" onerror="document.title = 1"><h1>'))
    page, said = look(html.as_uri(), tmp_path / "browser")
    assert "<title>taken</title>" not in page
    assert "<title>1</title>" not in page
    assert len([line for line in said if "Content Security Policy" in line]) == 3


# A chart as plotly.js keeps it, and places in the window: of what is in its plot, of a point of a line, of an element.
IN_THE_PAGE = """
window.chart = (name) => document.getElementById(`chart-${name}`);
window.plot = (name) => { chart(name).scrollIntoView({ block: "center" });
  const box = chart(name).querySelector('.nsewdrag[data-subplot="xy"]').getBoundingClientRect();
  return { left: box.left, top: box.top, width: box.width, height: box.height }; };
window.range = (name, axis) => [...chart(name)._fullLayout[axis].range];
window.middle = (element) => { const box = element.getBoundingClientRect(); return (box.left + box.right) / 2; };
"""


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("driven")
    with open_page(write_report(run, folder / "report").html.as_uri(), folder / "browser") as page:
        page.value(IN_THE_PAGE)
        page.wait("[...document.querySelectorAll('.chart > div')].every((e) => e.querySelector('.nsewdrag'))")
        yield page
        assert page.said == []


def spot(page, chart, across, down):
    """A place in the window by its shares of a chart's plot."""
    box = page.value(f"plot({chart!r})")
    return box["left"] + across * box["width"], box["top"] + down * box["height"]


def zoomed_out(page, chart, axis, whole):
    """Double-click until a chart shows all again: a busy machine may take both clicks for single ones."""
    for _ in range(20):
        page.click(*spot(page, chart, 0.5, 0.5), times=2)
        if page.value(f"range({chart!r}, {axis!r})") == pytest.approx(whole):
            return
    pytest.fail(f"{chart} still shows {page.value(f'range({chart!r}, {axis!r})')}")


def test_a_drag_zooms_to_what_it_spans_and_a_double_click_shows_all_again(page):
    whole = {axis: page.value(f"range('learning_curve', '{axis}')") for axis in ("xaxis", "yaxis")}
    page.drag(spot(page, "learning_curve", 0.2, 0.1), spot(page, "learning_curve", 0.6, 0.9))
    page.wait(f"range('learning_curve', 'xaxis')[0] > {whole['xaxis'][0]}")
    for axis, (low, high) in {"xaxis": (0.2, 0.6), "yaxis": (0.1, 0.9)}.items():
        begin, length = whole[axis][0], whole[axis][1] - whole[axis][0]
        found = page.value(f"range('learning_curve', {axis!r})")
        assert found == pytest.approx([begin + low * length, begin + high * length], abs=0.01 * length)
    zoomed_out(page, "learning_curve", "xaxis", whole["xaxis"])
    assert page.value("range('learning_curve', 'yaxis')") == pytest.approx(whole["yaxis"])


def test_panels_of_classes_zoom_together(page):
    whole = page.value("range('classes', 'xaxis')")
    page.drag(spot(page, "classes", 0.2, 0.5), spot(page, "classes", 0.7, 0.5))
    first = page.wait(f"range('classes', 'xaxis')[0] > {whole[0]} && range('classes', 'xaxis')")
    assert page.value("range('classes', 'xaxis2')") == pytest.approx(first)
    zoomed_out(page, "classes", "xaxis2", whole)


def test_what_the_mouse_is_over_tells_its_numbers(run, page):
    history = load_history(run)
    series = {series.label: series for series in run_charts(run, history)[0].panels[0].series}["after adaptation"]
    place = page.value("""(() => { const box = plot("learning_curve"), of = chart("learning_curve");
      const line = of.data.find((trace) => trace.name === "after adaptation"), { xaxis, yaxis } = of._fullLayout;
      return [box.left + xaxis.l2p(line.x[1]), box.top + yaxis.l2p(line.y[1])]; })()""")
    page.move(*place)
    told = page.wait("chart('learning_curve').querySelector('.hoverlayer .hovertext')?.textContent")
    assert "iteration 1" in told
    steps, _, value = told.partition("iteration 1")[2].partition(" steps")
    assert steps == f"{history.env_steps[1]:,.0f}"
    assert float(value) == pytest.approx(series.values[1], rel=1e-3)


def test_a_click_on_a_name_hides_its_line(page):
    page.value("plot('entropy') && 0")
    name = page.value("""(() => { const [toggle] = chart("entropy").querySelectorAll(".legendtoggle");
      const box = toggle.getBoundingClientRect(); return [box.left + 10, box.top + box.height / 2]; })()""")
    page.click(*name)
    page.wait("chart('entropy').data.filter((trace) => trace.visible === 'legendonly').length == 1")
    page.click(*name)
    page.wait("chart('entropy').data.every((trace) => trace.visible !== 'legendonly')")


def test_enter_and_space_do_what_a_click_on_a_name_does(page):
    hidden = "chart('learning_curve').data.filter((trace) => trace.visible === 'legendonly').map((trace) => trace.name)"
    focus = "[document.activeElement.ariaLabel, document.activeElement.ariaPressed]"
    page.value("against.focus()")
    page.press("Tab")
    assert page.value(focus) == ["before adaptation", "true"]
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait(f"{hidden} == 'before adaptation'")
    assert page.value(focus) == ["before adaptation", "false"]  # the focus stays where it was
    page.press("Tab")
    assert page.value(focus) == ["after adaptation", "true"]
    page.value("against.value = 'iterations'; against.dispatchEvent(new Event('change')); 0")
    page.wait("chart('learning_curve').layout.xaxis.title.text === 'iteration'")
    page.wait(f"{hidden}.length == 0")  # drawn again with every line, and with its keys
    assert page.value(focus) == ["after adaptation", "true"]
    page.press(" ")
    page.wait(f"{hidden} == 'after adaptation'")
    page.value("against.value = 'x'; against.dispatchEvent(new Event('change')); 0")
    page.wait(f"{hidden}.length == 0")


def test_all_charts_can_be_seen_against_iterations(page):
    choose = "(value) => { against.value = value; against.dispatchEvent(new Event('change')); }"
    page.value(f"({choose})('iterations')")
    page.wait("chart('entropy').layout.xaxis.title.text === 'iteration'")
    assert page.value("chart('learning_curve').data.at(-2).x") == [0, 1, 2]
    page.value(f"({choose})('x')")
    page.wait("chart('entropy').layout.xaxis.title.text === 'environment steps'")


def test_titles_stand_over_their_panels_and_a_narrow_window_stacks_them(page):
    titles = "[...chart('classes').querySelectorAll('.annotation-text')].map(middle)"
    panels = "[...chart('classes').querySelectorAll('.nsewdrag')].map(middle)"
    assert page.value(titles) == pytest.approx(page.value(panels), abs=2)
    assert len({*map(round, page.value(panels))}) == 4
    try:
        page.resize(400, 900)
        # One column is drawn first, as wide as before, then narrower panels, and then their titles.
        page.wait(f"new Set({panels}.map(Math.round)).size == 1 && Math.max(...{panels}, ...{titles}) < 400")
        assert page.value(titles) == pytest.approx(page.value(panels), abs=2)
        assert page.value("document.documentElement.scrollWidth") == 400
        page.resize(380, 900)
        page.wait("chart('entropy')._fullLayout.width < 340")
        heights = "((e) => [e._fullLayout.height, e.offsetHeight])(chart('classes'))"
        assert page.value(heights) == pytest.approx([60 + 4 * 210 + 3 * 19] * 2, abs=1)
    finally:
        page.resize(1280, 900)
