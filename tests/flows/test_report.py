import base64
import copy
import gzip
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import Observer, train
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import count, number, size
from metaloom.flows.operations import late
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import charts, report
from metaloom.flows.views.history import load_history, stage_seconds
from metaloom.flows.views.page import plotly_file
from metaloom.flows.views.report import CLASS_TABLE, learning_curve, report_page, write_figures, write_report
from metaloom.flows.views.run_charts import BAND_NOTE, run_charts
from metaloom.flows.views.series import GAP_NOTE, Chart, Panel, Series, explain_gaps
from metaloom.storage import Retention, StageRef

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


def test_the_page_begins_with_the_last_returns_before_adaptation_and_after_it(run):
    tiles = {name.partition(",")[0]: value for name, value in report_page(run, load_history(run)).tiles}
    ends = {name: run[2].rollouts(k).episode_returns.mean() for name, k in (("before", 0), ("after", 2))}
    for name, mean in ends.items():
        assert tiles[f"last return {name} adaptation"] == number(mean)
    assert tiles["environment steps"] == count(run[2].metrics()["env_steps"])


def test_the_tables_of_the_page_are_of_the_last_iteration_and_facts_of_the_environment_in_one(run):
    tables = report_page(run, load_history(run)).tables
    assert tables["Metrics of iteration 2"] == [(name, number(value)) for name, value in run[2].metrics().items()]
    about_env = [
        [name.startswith(("components.", "task_classes.")) for name, _ in tables[title]]
        for title in ("Environment", "Versions and machine")
    ]
    assert [any(facts) for facts in about_env] == [True, False]
    rows = metaloom.open_run(run.path).class_returns(2).to_pylist()
    corners = [name for name in dict.fromkeys(row["class"] for row in rows) if name != "balanced"]
    shown = {name.partition(" (")[0]: value for name, value in tables[CLASS_TABLE]}
    for name in corners:
        ends = [row for row in rows if row["class"] == name and row["step"] in (0, 2)]
        means = [number(row["average_return"]) for row in ends if row["num_tasks"]]
        assert [text.partition(" ±")[0] for text in shown[name].split(" → ")] == means or not means


def test_the_band_holds_the_middle_half_of_the_tasks(run):
    figure = learning_curve("name", load_history(run))
    before, _after = figure.axes[0].collections
    by_task = run[0].rollouts(0).episode_returns.mean(axis=1)
    at_first_point = [y for x, y in before.get_paths()[0].vertices if x == figure.axes[0].lines[0].get_xdata()[0]]
    np.testing.assert_allclose(
        [min(at_first_point), max(at_first_point)], np.quantile(by_task, [0.25, 0.75]), rtol=1e-6
    )
    assert BAND_NOTE in [text.get_text() for text in figure.axes[0].texts]


def test_a_report_weighs_the_files_that_thinning_left(tmp_path, copy_tiny_run):
    run = storage.open_run(copy_tiny_run(tmp_path / "run"))

    def weight() -> str:
        return dict(report_page(run, load_history(run)).tiles)["on disk"]

    whole = weight()
    assert whole == size(run.files.num_bytes())
    thin(run.path, Retention(keep_last=1))
    assert weight() == size(run.files.num_bytes()) != whole


def test_the_page_of_a_fork_tells_from_where_on_its_settings_hold(run, tmp_path):
    fork = metaloom.fork(run, 2, tmp_path / "fork", algorithm={"clip_eps": 0.1})
    told = report_page(fork, load_history(fork)).subtitle
    assert told.endswith(f"forked from {run.path.name}@2: settings as below from iteration 2 on")
    assert "fork" not in report_page(run, load_history(run)).subtitle


TITLES = {
    "learning_curve": "Learning curve",
    "classes": "Before and after adaptation, by class of task",
    "returns_by_class": "Return by class of task, after adaptation",
    "returns_by_class_before": "Return by class of task, before adaptation",
    "adaptation": "What adaptation did for each task",
    "task_returns": "Return of each task after adaptation",
    "kl_divergence": "KL divergence",
    "entropy": "Policy entropy",
    "loss": "Loss",
    "meta_gradient": "Norm of the meta-gradient",
    "explained_variance": "Explained variance",
    "stage_seconds": "Seconds per iteration by stage",
    "stage_seconds_by_iteration": "Where the time went",
}


def charts_of(run):
    return {chart.name: chart for chart in run_charts(run, load_history(run))}


@pytest.mark.parametrize("static", [True, False])
def test_a_report_is_a_picture_and_a_page_that_holds_all_its_charts(run, tmp_path, static):
    files = write_report(run, tmp_path / "new" / "folder", static=static)
    assert files.png.read_bytes().startswith(b"\x89PNG")
    html = files.html.read_text(encoding="utf-8")
    if static:
        pictures = [base64.b64decode(data) for data in PICTURE.findall(html)]
        assert len(pictures) == html.count("<img") == len(TITLES)
        assert all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in pictures)
        assert "<script" not in html
        # Beside a picture stands its note; in it, each text is a comment as well.
        assert b"<!-- environment steps -->" in pictures[0]
        assert b"<!-- line" not in pictures[0]
        for alternative in ("KL divergence of the update, against environment steps", "Seconds per iteration by stage"):
            assert f'alt="{alternative}"' in html
    else:
        assert re.findall(r'<div id="chart-(\w+)"', html) == [*TITLES]
        assert [chart["name"] for chart in embedded(html)] == [*TITLES]
        packed = re.search(r'id="plotly">([A-Za-z0-9+/=]+)<', html)
        assert packed is not None
        assert gzip.decompress(base64.b64decode(packed[1])) == plotly_file().read_bytes()
        assert len(html) < 2.5e6
    for title in TITLES.values():
        assert title in html
    for part in (
        "algorithm.inner_lr",
        "3 of 3",
        "task_classes.names",
        run.record(StageRef(0, "adapt")).versions["torch"],
        "configuration digest",
    ):
        assert part in html


def embedded(html: str):
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html)
    assert found is not None
    return json.loads(found[1])


def test_both_renderers_have_the_numbers_of_the_same_chart(run, tmp_path):
    by_name = {chart["name"]: chart for chart in embedded(write_report(run, tmp_path).html.read_text("utf-8"))}
    drawings = charts_of(run)
    assert [name for name, chart in drawings.items() if chart.wide] == ["learning_curve", "classes"]
    for name, chart in drawings.items():
        if chart.kind != "lines":
            continue
        drawn = [axes for axes in charts.draw(chart).axes if axes.lines]
        for axes, panel in zip(drawn, by_name[name]["panels"], strict=True):
            for line, series in zip(axes.lines, panel["series"], strict=True):
                np.testing.assert_allclose(line.get_ydata(), np.array(series["values"], float), rtol=1e-6)
                assert line.get_color() == series["color"]


def test_every_task_is_a_point_in_the_colour_of_its_class(run):
    by_name = charts_of(run)
    tasks, returns = run[-1].tasks(), [run[-1].rollouts(k).episode_returns.mean(axis=1) for k in (0, 2)]
    chart = by_name["adaptation"]
    np.testing.assert_allclose(chart.x, returns[0], rtol=1e-6)
    for series in chart.panels[0].series:
        shown = np.flatnonzero(~np.isnan(series.values))
        np.testing.assert_allclose(series.values[shown], returns[1][shown], rtol=1e-6)
        # The corners are classes: their names say the signs of x and of y.
        x, y = tasks.params[shown].T
        assert (((x > 0) == ("right" in series.label)) & ((y > 0) == ("upper" in series.label))).all()
    shown = [~np.isnan(series.values) for series in chart.panels[0].series]
    assert (np.sum(shown, axis=0) == 1).all()
    assert charts.draw(chart).axes[0].get_aspect() == 1  # against the diagonal


def test_points_of_tasks_are_at_most_as_many_as_a_page_can_draw_whatever_the_number_of_tasks(run):
    history = load_history(run)
    iterations, num_tasks = np.arange(400), 1000
    many = replace(
        history,
        iterations=iterations,
        metrics={"env_steps": 10.0 * (1 + iterations)},
        task_returns=np.zeros((400, 3, num_tasks)),
        by_class=(),
    )
    (chart,) = (chart for chart in run_charts(run, many) if chart.name == "task_returns")
    assert len(chart.x) == 20_000
    assert chart.iterations is not None
    assert np.unique(chart.iterations)[[0, -1]].tolist() == [0, 399]
    assert "of 20 iterations evenly spaced" in chart.note


def test_a_panel_for_every_class_has_the_returns_before_and_after(run):
    history = load_history(run)
    panels = charts_of(run)["classes"].panels
    assert [panel.title for panel in panels] == [*history.by_class[0][0].names]
    for c, panel in enumerate(panels):
        for series, k in zip(panel.series, (0, 2), strict=True):
            expected = [steps[k].estimates[c].mean for steps in history.by_class]
            np.testing.assert_array_equal(series.values, expected)


def test_gaps_in_bands_are_explained_where_there_are_any():
    whole = Series("a", "#000000", np.ones(2), (np.zeros(2), np.ones(2)))
    gap = Series("b", "#000000", np.ones(2), (np.array([0, np.nan]), np.array([1, np.nan])))
    chart = Chart("n", "s", "lines", "t", "x", "y", "note", "band", np.zeros(2), (Panel("", (whole,)),))
    assert explain_gaps(chart) is chart
    assert explain_gaps(replace(chart, panels=(Panel("", (whole, gap)),))).note == "note" + GAP_NOTE


def test_every_chart_is_a_file_for_a_paper(run, tmp_path):
    files = write_figures(run, tmp_path / "new" / "figures", "svg")
    assert [file.name for file in files] == [f"{name}.svg" for name in TITLES]
    assert all(ElementTree.parse(file).getroot().tag.endswith("svg") for file in files)


def test_a_figure_as_pdf_has_fonts_that_journals_take_and_is_the_same_each_time(run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_charts", lambda run, history: run_charts(run, history)[:1])
    first, again = (write_figures(run, tmp_path / name, "pdf")[0].read_bytes() for name in "aa")
    assert first.startswith(b"%PDF")
    assert b"/Type3" not in first
    assert first == again


def test_a_notebook_draws_the_charts_by_name(run):
    plots = metaloom.open_run(run.path).plot
    assert plots.names() == [*TITLES]
    assert {*TITLES} <= {*dir(plots)}
    assert plots.kl_divergence().axes[0].get_title(loc="left").startswith(TITLES["kl_divergence"])
    assert plots.learning_curve()._repr_png_().startswith(b"\x89PNG")
    drawn = lines(plots.learning_curve())
    assert list(drawn) == ["before adaptation", "after 1 inner step", "after adaptation"]
    with pytest.raises(UsageError, match="no chart 'evaluation'; choose one of learning_curve, classes"):
        plots.evaluation()
    # A notebook asks for methods such as `_repr_html_`; a copy, for `__setstate__`. Neither is a chart.
    assert not hasattr(plots, "_repr_html_")
    assert copy.copy(plots).names() == plots.names()


def test_a_report_holds_a_film_where_one_is_asked_for(run, tmp_path, monkeypatch, capsys):
    filmed, right = [], late.film_run

    def film_run(path, iteration, *options, **named):
        filmed.append(iteration)
        return right(path, iteration, *options, **named)

    monkeypatch.setattr(late, "film_run", film_run)
    assert cli.run(["report", str(run.path), "--out", str(tmp_path), "--video", "--static"]) == 0
    html = (tmp_path / "report.html").read_text("utf-8")
    (data,) = re.findall(r'src="data:image/webp;base64,([A-Za-z0-9+/=]+)"', html)
    film = Image.open(io.BytesIO(base64.b64decode(data)))
    assert film.n_frames > 5
    assert filmed == [-1]
    assert "card as-is" in html
    assert "simulated again from its seed and stored actions.<" in html


def test_options_that_mean_nothing_alone_are_refused(run, capsys):
    assert cli.run(["report", str(run.path), "--format", "pdf"]) == 2
    assert "--format requires --figures" in capsys.readouterr().err
    assert cli.run(["report", str(run.path), "--trust"]) == 2
    assert "--trust requires --video" in capsys.readouterr().err


def test_a_report_tells_where_its_figures_are():
    files = report.ReportFiles(Path("a.png"), Path("a.html"), (Path("figures/a.svg"), Path("figures/b.svg")))
    assert str(files).splitlines()[2:] == ["2 figures      figures: a.svg, b.svg"]


def test_a_report_of_a_strangely_named_run_is_intact(run, tmp_path):
    html = write_report(run, tmp_path).html.read_text(encoding="utf-8")
    assert "<h1>a &lt;b&gt; &amp; &#x27;c&#x27; $run</h1>" in html
    assert "<b> &" not in html


def test_the_same_run_gives_the_same_files(run, tmp_path):
    first, second = write_report(run, tmp_path / "1"), write_report(run, tmp_path / "2")
    assert first.png.read_bytes() == second.png.read_bytes()
    assert first.html.read_bytes() == second.html.read_bytes()


def test_timing_has_every_stage_that_runs_in_each_iteration(run):
    seconds = stage_seconds(run, len(run))
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


def test_a_report_reads_each_record_once_and_each_iteration_once_and_says_how_far_it_is(run, tmp_path, monkeypatch):
    whole, reads, far = load_history(run), list[StageRef](), list[tuple[int, int]]()
    monkeypatch.setattr("metaloom.flows.views.history._BLOCK", 2)
    monkeypatch.setattr("metaloom.flows.views.history._TOLD_EVERY", 10)
    record, episodes = storage.Run.record, storage.Run.episodes
    blocks = list[list[int]]()
    monkeypatch.setattr(storage.Run, "record", lambda of, ref: reads.append(ref) or record(of, ref))
    monkeypatch.setattr(storage.Run, "episodes", lambda of, chosen: blocks.append([*chosen]) or episodes(of, chosen))
    write_report(run, tmp_path / "report", on_progress=lambda done, total: far.append((done, total)))
    assert blocks == [[0, 1], [2]]
    assert len(reads) == len({*reads}) == len(run.refs()) - 1  # what makes the first learner takes no iteration's time
    assert [done for done, _ in far] == [0, 2, 3, 13, 23]
    assert {total for _, total in far} == {3 + len(run.refs())}
    parts = load_history(run)
    for name in ("iterations", "task_returns", "task_classes"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert repr((parts.metrics, parts.by_class)) == repr((whole.metrics, whole.by_class))


def test_an_unfinished_iteration_is_left_out(tmp_path, tiny_config):
    calls = []
    stop = Observer(should_stop=lambda: len(calls) > 12, stage_started=calls.append)
    assert train(tiny_config(), tmp_path / "run", backend=SERIAL, observer=stop).iterations_done == 1
    run = storage.open_run(tmp_path / "run")
    history = load_history(run)
    assert {len(row) for row in stage_seconds(run, 1).values()} == {1}
    assert ("iterations done", "1 of 3") in report_page(run, history).tiles
    assert write_report(run, tmp_path / "report").html.exists()


@pytest.mark.parametrize("link", ["reports", "reports/run", "reports/run/report.html"])
def test_a_link_in_place_of_a_report_is_refused_and_not_followed(link, copy_tiny_run, tmp_path, capsys):
    path, outside = copy_tiny_run(tmp_path / "runs" / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "report.html").write_text("mine")
    (tmp_path / "runs" / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs" / link).symlink_to(outside / "report.html" if link.endswith(".html") else outside)
    assert cli.run(["report", str(path), "--static"]) == 2
    assert f"{link} is a symbolic link" in capsys.readouterr().err
    assert [file.name for file in outside.iterdir()] == ["report.html"]
    assert (outside / "report.html").read_text() == "mine"


def test_a_run_without_adaptation_has_one_curve(tmp_path, tiny_config):
    algorithm = {"name": "promp", "inner_steps": 0, "num_epochs": 1}
    train(tiny_config(iterations=1, algorithm=algorithm), tmp_path / "run", backend=SERIAL)
    run = storage.open_run(tmp_path / "run")
    history = load_history(run)
    assert list(lines(learning_curve("name", history))) == ["return"]
    assert not any("before adaptation" in name for name, _ in report_page(run, history).tiles)
    assert write_report(run, tmp_path / "report").png.exists()


def test_a_run_without_a_complete_iteration_is_refused(tmp_path, tiny_config):
    train(tiny_config(), tmp_path / "run", backend=SERIAL, observer=Observer(should_stop=lambda: True))
    with pytest.raises(ValueError, match="no complete iteration"):
        write_report(storage.open_run(tmp_path / "run"), tmp_path / "report")
    assert not (tmp_path / "report").exists()
    assert metaloom.open_run(tmp_path / "run").plot.names() == []
