"""The report in a real browser, where there is one, opened as a file: it draws, and may do nothing else."""

import re

import pytest
from browsing import NEEDS_BROWSER, look

from metaloom import storage
from metaloom.flows.views.history import load_history
from metaloom.flows.views.report import write_report
from metaloom.flows.views.run_charts import run_charts

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


def test_a_script_that_the_report_does_not_hold_may_not_run(run, tmp_path):
    html = write_report(run, tmp_path / "report").html
    text = html.read_text("utf-8").replace("<main>", "<main><script>document.title = 'taken'</script>")
    html.write_text(text.replace("<h1>", '<img src="https://example.org/x.png" onerror="document.title = 1"><h1>'))
    page, said = look(html.as_uri(), tmp_path / "browser")
    assert "<title>taken</title>" not in page
    assert "<title>1</title>" not in page
    assert len([line for line in said if "Content Security Policy" in line]) == 3
