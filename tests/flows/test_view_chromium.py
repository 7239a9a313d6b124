"""The page over runs in a real browser, where there is one: it draws, and asks no other host."""

import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from browsing import NEEDS_BROWSER, look
from driving import open_page

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.report import write_report

NAME = "<b onclick=alert(1)>bold"

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


@contextmanager
def served(runs):
    """Address of the page over a folder."""
    command = [sys.executable, "-m", "metaloom.flows.cli", "view", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, copy_tiny_run):
    """A run, one with markup for a name, and one that is damaged."""
    runs = tmp_path_factory.mktemp("browsed") / "runs"
    for name in ("tiny", NAME):
        copy_tiny_run(runs / name)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{}")
    return runs


@pytest.fixture(scope="module")
def address(runs):
    with served(runs) as address:
        yield address


@pytest.fixture(scope="module")
def page(address, tmp_path_factory):
    with open_page(address, tmp_path_factory.mktemp("driven"), hovers=True) as page:
        yield page


def go(page, place, drawn):
    """Show a page, whatever was shown before, until it has so many charts and reads no more."""
    page.value(f"history.replaceState(null, '', {'#/' + place!r}); window.dispatchEvent(new Event('hashchange')); 0")
    page.wait("!document.body.innerText.includes('Reading')")
    page.wait(f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {2 * drawn}")


def test_the_list_shows_every_run_and_takes_no_name_for_markup(address, tmp_path):
    page, said = look(address, tmp_path)
    assert said == []
    assert 'href="#/run/tiny"' in page
    assert "&lt;b onclick=alert(1)&gt;bold" in page
    assert "<b onclick" not in page
    assert 'class="state damaged"' in page
    assert page.count("<polyline") == 2


@pytest.mark.parametrize(
    ("place", "words", "charts"),
    [
        ("run/tiny", ["Learning curve of tiny", "middle half of the tasks", "meta_optimize"], 5),
        (f"run/{quote(NAME)}/iteration/2", ["Before and after adaptation", "Paths before", "Where adaptation took"], 4),
        ("run/tiny/output/2/adapt/0", ["metaloom", "replay", "seed position", "collect_rollouts k=0"], 0),
        ("run/tiny/array/2/collect_rollouts/1?array=rollouts_1%2Frewards", ["top to bottom", "task 4"], 1),
        ("run/tiny/episode/2/collect_rollouts/1?task=0&episode=0", ["Show the film", "observations: x (m)"], 4),
    ],
)  # fmt: skip
def test_a_page_draws_its_charts_without_a_word_from_the_browser(page, place, words, charts):
    page.said.clear()
    go(page, place, charts)
    for word in words:
        page.wait(f"document.body.innerText.includes({word!r})")
    assert page.value("document.querySelectorAll('.problem').length") == 0
    assert page.said == []


EVERY_PAGE = {
    "": 0,
    "run/{}": 5,
    "run/{}/iteration/2": 4,
    "run/{}/output/2/adapt/0": 0,
    "run/{}/array/2/collect_rollouts/1?array=rollouts_1%2Fobservations": 1,
    "run/{}/episode/2/collect_rollouts/1?task=0&episode=0": 4,
}
"""With the least number of charts on each."""


@pytest.mark.parametrize("place", EVERY_PAGE)
def test_no_page_breaks_a_rule_of_accessibility(page, place):
    go(page, place.format("tiny"), EVERY_PAGE[place])
    assert page.violations() == []


# In two goes: the second presses what the first has brought, such as the buttons of a dialog. All charts have the same
# buttons, of which one of each title is pressed: to draw a chart as a PNG takes seconds.
PRESS = """(() => {
  const pressed = new Set(), titles = new Set(), opened = [];
  window.open = (url) => { opened.push(url); return null; };
  for (const go of [1, 2]) {
    for (const button of [...document.querySelectorAll("button, summary, .modebar-btn, .chart a")]) {
      const title = button.dataset.title;
      if (pressed.has(button) || (title && titles.has(title))) continue;
      pressed.add(button);
      titles.add(title);
      button.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    }
  }
  return { names: [...pressed].map((one) => one.dataset.title ?? one.textContent), opened };
})()"""
LINKS = "[...document.querySelectorAll('a')].map((a) => new URL(a.href.baseVal ?? a.href, location).hostname)"


def test_no_button_or_link_of_any_page_leads_to_another_host(runs, tmp_path, tiny_config):
    config = tiny_config(env={"name": "small_envs:Linked"}, num_tasks=8, task_sampling="balanced")
    linked = train(config, runs.parent / "linked" / "run", backend=Backend(workers=0)).path
    report = write_report(storage.open_run(linked), tmp_path / "report").html.as_uri()
    with served(linked.parent) as address, open_page(address, tmp_path / "browser", hovers=True) as page:
        for place, drawn in [*EVERY_PAGE.items(), (report, 13)]:
            if place == report:
                page.send("Page.navigate", url=report)
                page.wait(f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {2 * drawn}")
            else:
                go(page, place.format("run"), drawn)
            assert {*page.value(LINKS)} <= {"127.0.0.1", ""}
            pressed = page.value(PRESS)
            assert not drawn or "Download plot as a PNG" in pressed["names"]
            assert pressed["opened"] == []
        page.wait("document.readyState == 'complete'")
    outside = [url for url in page.asked if not url.startswith((address, report, "data:", "blob:", "about:"))]
    assert outside == []
    assert len(page.asked) > 20


def test_one_step_is_at_one_place_in_every_chart_of_an_episode(page):
    for width in (390, 1440, 1920):
        page.resize(width, 900)
        go(page, "run/tiny/episode/2/collect_rollouts/1?task=0&episode=0", 4)
        page.wait("document.querySelectorAll('.cursor').length == document.querySelectorAll('.chart').length")
        page.value("""(() => { const range = document.querySelector("input[type=range]");
          range.value = 7; range.dispatchEvent(new Event("input")); })()""")
        places = page.value(
            "[...document.querySelectorAll('.cursor')].map((line) => line.getBoundingClientRect().left)"
        )
        assert len(places) >= 6
        assert max(places) - min(places) < 0.5
        assert page.value("document.documentElement.scrollWidth") == width


def test_a_legend_works_by_keyboard_and_names_its_chart(page):
    go(page, "run/tiny", 5)
    focus = "[document.activeElement.closest('.chart')?.ariaLabel, document.activeElement.ariaLabel]"
    page.value("document.querySelector('main select').focus()")
    while (at := page.value(focus)) == [None, None]:
        page.press("Tab")
    while page.value("document.activeElement.localName") != "rect":  # past the buttons of the chart
        page.press("Tab")
    at = page.value(focus)
    assert at == ["Learning curve of tiny", "before adaptation"]
    page.press("Enter")
    page.wait("document.activeElement.ariaPressed == 'false'")
    visible = "document.querySelector('.chart').data.find((trace) => trace.name == 'before adaptation').visible"
    assert page.value(visible) == "legendonly"
    page.resize(390, 900)  # drawn again
    page.wait("document.querySelector('.chart')._fullLayout.width < 390")
    assert page.value(focus) == at
    page.press("Enter")
    page.wait("document.activeElement.ariaPressed == 'true'")
    page.resize(1280, 900)


def test_the_focus_stays_on_a_control_that_is_written_again(page):
    go(page, "run/tiny/array/2/collect_rollouts/1?array=rollouts_1%2Frewards", 1)
    page.value("[...document.querySelectorAll('main button')].find((one) => one.innerText == 'lines').focus()")
    page.press("Enter")
    page.wait("document.body.innerText.includes('a line for each')")
    assert page.value("[document.activeElement.innerText, document.activeElement.ariaPressed]") == ["lines", "true"]
    go(page, "", 0)
    page.value("(window.before = document.querySelector('main td a')).focus()")
    page.wait("!before.isConnected")
    assert page.value("document.activeElement.hash == before.hash")


def test_where_directions_and_distances_are_true_both_axes_have_one_scale(page):
    go(page, "run/tiny/iteration/2", 5)
    page.wait("document.body.innerText.includes('second component')")
    scales = page.value("""[...document.querySelectorAll(".chart")].map((chart) => chart._fullLayout)
      .filter((of) => ["first component", "x (m)"].includes(of.xaxis.title.text))
      .map((of) => of.xaxis._m / -of.yaxis._m)""")
    assert scales == pytest.approx([1, 1, 1], rel=0.01)


def test_charts_stay_in_their_cards_when_plotly_is_there_before_the_page(page):
    for place in ("run/tiny", "run/tiny/iteration/2", "run/tiny/array/2/collect_rollouts/1?array=rollouts_1%2Frewards"):
        go(page, place, 1)
        wider = """[...document.querySelectorAll(".chart .main-svg")].filter((svg) =>
          svg.getBoundingClientRect().width > svg.closest(".chart").getBoundingClientRect().width + 1).length"""
        assert page.value(wider) == 0


def test_one_fault_is_told_once_and_the_rest_of_an_iteration_is_shown(runs, page):
    table = runs / "tiny" / "tables" / "episodes" / "00000001.parquet"
    sound = table.read_bytes()
    table.write_bytes(sound[:30] + bytes([sound[30] ^ 1]) + sound[31:])
    try:
        go(page, "run/tiny/iteration/1", 3)
        (problem,) = page.value("[...document.querySelectorAll('.problem')].map((one) => one.innerText)")
    finally:
        table.write_bytes(sound)
    assert "00000001.parquet" in problem


def test_only_what_is_stored_has_a_link(page):
    nexts = "[...document.querySelectorAll('a')].filter((a) => a.innerText == 'next →').map((a) => a.hash)"
    go(page, "run/tiny/iteration/1", 1)
    assert page.value(nexts) == ["#/run/tiny/iteration/2"]
    go(page, "run/tiny/iteration/2", 1)
    assert page.value(nexts) == []


@pytest.mark.parametrize(
    ("place", "links"),
    [
        ("nonsense", ["#/"]),
        ("run/nothing", ["#/"]),
        ("run/broken", ["#/"]),
        ("run/tiny/nonsense", ["#/", "#/run/tiny"]),
        ("run/tiny/iteration/1e3", ["#/", "#/run/tiny"]),
        ("run/tiny/iteration/9", ["#/", "#/run/tiny"]),
        ("run/tiny/output/2/adapt/7", ["#/", "#/run/tiny"]),
    ],
)
def test_what_is_not_there_is_told_once_with_links_to_what_is(page, place, links):
    go(page, place, 0)
    assert page.wait("[...document.querySelectorAll('main .problem')].map((one) => one.innerText).length") == 1
    assert page.value("[...document.querySelectorAll('main a')].map((a) => a.hash)") == links
