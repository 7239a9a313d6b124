"""The page over runs in a real browser, where there is one: it draws, and asks no other host."""

import re
import subprocess
import sys
from urllib.parse import quote

import pytest
from browsing import NEEDS_BROWSER, look

NAME = "<b onclick=alert(1)>bold"

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


@pytest.fixture(scope="module")
def address(tmp_path_factory, copy_tiny_run):
    """Address of the page over a run, one with markup for a name, and one that is damaged."""
    runs = tmp_path_factory.mktemp("browsed") / "runs"
    for name in ("tiny", NAME):
        copy_tiny_run(runs / name)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{}")
    command = [sys.executable, "-m", "metaloom.flows.cli", "view", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()
            process.wait()


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
def test_a_page_draws_its_charts_without_a_word_from_the_browser(address, place, words, charts, tmp_path):
    page, said = look(f"{address}#/{place}", tmp_path)
    assert "modebar-btn" not in page  # nothing hovers in this browser, and buttons would lie on legends
    assert said == []
    assert 'class="problem"' not in page
    assert [word for word in words if word not in page] == []
    assert len(re.findall(r'class="chart js-plotly-plot"', page)) >= charts


def test_a_page_that_is_not_there_says_so(address, tmp_path):
    page, _ = look(f"{address}#/run/nothing", tmp_path)
    assert 'class="problem"' in page
    assert "no run 'nothing'" in page
