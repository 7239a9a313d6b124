"""Charts of runs with more inner steps than a chart tells apart: PEARL has one for every episode of context."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer.curves import Curves
from metaloom.flows.viewer.outputs import adaptation_page, returns_by_task
from metaloom.flows.views import charts
from metaloom.flows.views.history import RunHistory, load_history
from metaloom.flows.views.report import learning_curve, write_report
from metaloom.flows.views.run_charts import evaluation_lines, run_charts
from metaloom.flows.views.series import AFTER, BEFORE, BETWEEN, MOST_STEPS, evenly_spaced, shown_steps, steps_note
from metaloom.pipeline.types import Evaluation

NOTE = "; of inner steps 0 to 7, the first, the last and 4 in between are shown"
SHOWN = [0, 1, 3, 4, 6, 7]
"""Of steps 0 to 7: 1.4, 2.8, 4.2 and 5.6 are a fifth of the way apart."""
LABELS = [
    "before adaptation",
    "after 1 inner step",
    "after 3 inner steps",
    "after 4 inner steps",
    "after 6 inner steps",
    "after adaptation",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("runs") / "many"
    algorithm = {"name": "promp", "inner_steps": 7, "num_epochs": 1}
    train(tiny_config(iterations=1, algorithm=algorithm), path, backend=Backend(workers=0))
    return storage.open_run(path)


@given(st.integers(1, 300), st.integers(2, 100))
def test_places_are_all_or_as_many_as_asked_for_evenly_from_the_first_to_the_last(count, most):
    places = evenly_spaced(count, most)
    assert len(places) == min(count, most)
    assert (places[0], places[-1]) == (0, count - 1)
    gaps = np.diff(places)
    assert count == 1 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_every_inner_step_has_its_colour_up_to_as_many_as_there_are():
    assert shown_steps(0) == {0: AFTER}
    assert shown_steps(1) == {0: BEFORE, 1: AFTER}
    assert shown_steps(5) == dict(enumerate((BEFORE, *BETWEEN, AFTER)))
    assert steps_note(5) == ""


def test_of_more_inner_steps_the_first_the_last_and_those_between_have_six_colours():
    assert shown_steps(45) == dict(zip((0, 9, 18, 27, 36, 45), (BEFORE, *BETWEEN, AFTER), strict=True))
    assert steps_note(45) == "; of inner steps 0 to 45, the first, the last and 4 in between are shown"
    assert [*shown_steps(7)] == SHOWN
    assert (steps_note(5), steps_note(6) != "") == ("", True)


@pytest.mark.parametrize("last", [MOST_STEPS, 45, 200])
def test_the_learning_curve_of_many_inner_steps_has_room_for_its_lines_and_its_legend(last):
    returns = np.random.default_rng(0).normal(size=(3, last + 1, 4))
    history = RunHistory(np.arange(3), {"env_steps": np.arange(1, 4) * 1000.0}, returns)
    figure = learning_curve("name", history)
    # Warnings are errors: matplotlib has one for a layout without room.
    assert charts.rendered(figure, "png").startswith(b"\x89PNG")
    (axes,) = figure.axes
    for drawn, kept in ((axes, 0.6), (axes.get_legend(), 0)):
        box = drawn.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        assert box.width >= kept * figure.bbox.width
    for line, k in zip(axes.lines, shown_steps(last), strict=True):
        np.testing.assert_allclose(line.get_ydata(), returns[:, k].mean(axis=1))


def test_adapted_policies_are_told_in_the_order_of_their_steps(run):
    assert adaptation_page(run, 0)["policies"]["steps"] == [1, 2, 3, 4, 5, 6, 7]


def test_page_and_viewer_show_the_same_inner_steps_and_say_that_there_are_others(run, tmp_path):
    html = write_report(run, tmp_path).html.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html)
    embedded = {chart["name"]: chart for chart in json.loads(found[1])}
    viewed = {chart["title"]: chart for chart in Curves(run).data()["charts"]}
    means = [run[0].rollouts(k).episode_returns.mean() for k in SHOWN]
    for series in (
        embedded["learning_curve"]["panels"][0]["series"],
        viewed["Learning curve of many"]["panels"][0]["series"],
    ):
        assert [line["label"] for line in series] == LABELS
        np.testing.assert_allclose([line["values"][0] for line in series], means, rtol=1e-6)
        assert len({line["color"] for line in series}) == MOST_STEPS
    assert NOTE in html
    assert viewed["Learning curve of many"]["note"].endswith(NOTE)
    assert [line["label"] for line in viewed["Policy entropy"]["panels"][0]["series"]] == LABELS
    assert NOTE in viewed["Policy entropy"]["note"]


def test_an_iteration_compares_the_inner_steps_of_the_curves(run):
    page = returns_by_task(run, 0)
    assert [step["label"] for step in page["shown"]] == LABELS
    assert {step["step"]: step["color"] for step in page["shown"]} == shown_steps(7)
    assert page["unshown"] == NOTE
    assert [*page["steps"]] == [*range(8)]


def test_stages_of_many_inner_steps_are_one_bar_and_one_layer_of_all_their_seconds(run):
    found = {chart.name: chart.panels[0].series for chart in run_charts(run, load_history(run))}
    names = [
        "sample_tasks",
        "collect_rollouts k=0 to 7",
        "process_samples k=0 to 7",
        "adapt k=0 to 6",
        "meta_optimize",
    ]
    for name in ("stage_seconds", "stage_seconds_by_iteration"):
        assert [series.label for series in found[name]] == names
    adapted = sum(run.record(storage.StageRef(0, "adapt", k)).seconds for k in range(7))
    np.testing.assert_allclose(found["stage_seconds"][3].values, [adapted])


def test_an_evaluation_after_many_adaptation_steps_has_the_same_lines():
    B, K = 3, 7
    outcomes = {
        f"{kind}_{name}": np.zeros(shape, dtype)
        for kind, shape in (("test", (B, K + 1, 2)), ("adaptation", (B, K, 2)))
        for name, dtype in (("returns", np.float64), ("lengths", np.int32), ("terminated", np.bool_))
    }
    outcomes["test_returns"] += np.arange(K + 1.0)[:, None]
    evaluation = Evaluation(np.zeros((B, 1)), np.full(B, -1), ("goal",), ("m",), **outcomes)
    (chart,) = evaluation_lines("name", {0: (10.0, evaluation)}, None)
    assert [series.label for series in chart.panels[0].series] == LABELS
    np.testing.assert_allclose([series.values for series in chart.panels[0].series], np.transpose([SHOWN]))
    assert chart.note.endswith(NOTE)
