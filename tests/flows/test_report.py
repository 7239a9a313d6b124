import base64
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.train import Observer, train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.history import BAND_NOTE, load_history
from metaloom.flows.views.report import learning_curve, report_page, stage_seconds, write_report
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)
PICTURE = re.compile(r'<img src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)"')


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("runs") / "a <b> & 'c' $run"
    algorithm = {"name": "promp", "inner_steps": 2, "num_epochs": 1}
    train(tiny_config(iterations=3, algorithm=algorithm), path, backend=SERIAL)
    return storage.open_run(path)


def lines(figure) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}


def test_the_learning_curve_is_the_mean_return_of_every_round_against_environment_steps(run):
    figure = learning_curve("name", load_history(run))
    expected = [[it.rollouts(k).episode_returns.mean() for it in run] for k in range(3)]
    drawn = lines(figure)
    assert list(drawn) == ["before adaptation", "after 1 inner step", "after adaptation"]
    np.testing.assert_allclose(list(drawn.values()), expected, rtol=1e-12)
    steps = np.cumsum([sum(it.rollouts(k).num_steps for k in range(3)) for it in run])
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), steps)


def test_the_band_holds_the_middle_half_of_the_tasks(run):
    figure = learning_curve("name", load_history(run))
    before, _after = figure.axes[0].collections
    by_task = run[0].rollouts(0).episode_returns.mean(axis=1)
    at_first_point = [y for x, y in before.get_paths()[0].vertices if x == figure.axes[0].lines[0].get_xdata()[0]]
    np.testing.assert_allclose(
        [min(at_first_point), max(at_first_point)], np.quantile(by_task, [0.25, 0.75]), rtol=1e-6
    )
    assert BAND_NOTE in [text.get_text() for text in figure.axes[0].texts]


def test_a_report_is_a_picture_and_a_page_that_holds_all_its_charts(run, tmp_path):
    files = write_report(run, tmp_path / "new" / "folder")
    assert files.png.read_bytes().startswith(b"\x89PNG")
    html = files.html.read_text(encoding="utf-8")
    charts = [base64.b64decode(data) for data in PICTURE.findall(html)]
    titles = [
        "Learning curve",
        "Return by class of task, after adaptation",
        "Return by class of task, before adaptation",
        "KL divergence",
        "Policy entropy",
        "Loss",
        "Explained variance",
        "Median wall seconds of every stage",
        "Wall seconds of every stage over iterations",
    ]
    assert len(charts) == html.count("<img") == len(titles)
    assert all(ElementTree.fromstring(chart).tag.endswith("svg") for chart in charts)
    for title in titles:
        assert title in html
    for part in (
        "algorithm.inner_lr",
        "3 of 3",
        run.record(StageRef(0, "adapt")).versions["torch"],
        "configuration digest",
    ):
        assert part in html


def test_a_report_of_a_strangely_named_run_is_intact(run, tmp_path):
    html = write_report(run, tmp_path).html.read_text(encoding="utf-8")
    assert "<h1>a &lt;b&gt; &amp; &#x27;c&#x27; $run</h1>" in html
    assert "<b> &" not in html


def test_the_same_run_gives_the_same_files(run, tmp_path):
    first, second = write_report(run, tmp_path / "1"), write_report(run, tmp_path / "2")
    assert first.png.read_bytes() == second.png.read_bytes()
    assert first.html.read_bytes() == second.html.read_bytes()


def test_timing_has_every_stage_that_runs_in_each_iteration(run):
    seconds = stage_seconds(run.lineage(), len(run), run.stages.first)
    assert [(ref.stage, ref.step) for ref in seconds] == [
        ("sample_tasks", 0),
        ("collect_rollouts", 0),
        ("process_samples", 0),
        ("adapt", 0),
        ("collect_rollouts", 1),
        ("process_samples", 1),
        ("adapt", 1),
        ("collect_rollouts", 2),
        ("process_samples", 2),
        ("meta_optimize", 0),
    ]
    assert seconds[StageRef(0, "adapt", 1)][2] == run.record(StageRef(2, "adapt", 1)).seconds


def test_an_unfinished_iteration_is_left_out(tmp_path, tiny_config):
    calls = []
    stop = Observer(should_stop=lambda: len(calls) > 12, stage_started=calls.append)
    assert train(tiny_config(), tmp_path / "run", backend=SERIAL, observer=stop).iterations_done == 1
    run = storage.open_run(tmp_path / "run")
    history = load_history(run)
    assert {len(row) for row in stage_seconds(run.lineage(), 1, run.stages.first).values()} == {1}
    assert ("iterations done", "1 of 3") in report_page(run, history).tiles
    assert write_report(run, tmp_path / "report").html.exists()


def test_a_run_without_adaptation_has_one_curve(tmp_path, tiny_config):
    algorithm = {"name": "promp", "inner_steps": 0, "num_epochs": 1}
    train(tiny_config(iterations=1, algorithm=algorithm), tmp_path / "run", backend=SERIAL)
    run = storage.open_run(tmp_path / "run")
    history = load_history(run)
    assert list(lines(learning_curve("name", history))) == ["return"]
    assert "return before adaptation" not in dict(report_page(run, history).tiles)
    assert write_report(run, tmp_path / "report").png.exists()


def test_a_run_without_a_complete_iteration_is_refused(tmp_path, tiny_config):
    train(tiny_config(), tmp_path / "run", backend=SERIAL, observer=Observer(should_stop=lambda: True))
    with pytest.raises(ValueError, match="no complete iteration"):
        write_report(storage.open_run(tmp_path / "run"), tmp_path / "report")
    assert not (tmp_path / "report").exists()
