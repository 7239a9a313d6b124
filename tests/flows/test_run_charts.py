from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.flows.formatting import TRIAL_RETURNS
from metaloom.flows.views import run_charts
from metaloom.flows.views.history import RunHistory
from metaloom.flows.views.series import AFTER, CLASS_COLORS, GAP_NOTE, INK
from metaloom.pipeline.comparison.groups import Band, Estimate
from metaloom.pipeline.estimation.statistics import class_returns
from metaloom.pipeline.types import Evaluation
from metaloom.storage import StageRef


def history_of(returns, metrics=None, classes=None, names=()):
    """The history of runs with these mean returns by iteration, inner step and task."""
    returns, by_class = np.asarray(returns, float), []
    if names:
        by_class = [[class_returns(step, np.array(classes), names) for step in steps] for steps in returns]
    kinds = np.tile(classes, (len(returns), 1)) if names else None
    iterations = np.arange(len(returns))
    return RunHistory(iterations, metrics or {}, returns, by_class, kinds)


RETURNS = np.arange(2.0 * 3 * 4).reshape(2, 3, 4) ** 2


class Stages(dict):
    def in_group(self, group, iteration):
        return None  # no evaluation


def charts_of(history, seconds=None):
    """The charts of a run without evaluations, by name."""
    run = SimpleNamespace(path=Path("name"), stages=Stages(adapt=SimpleNamespace(group="adapted_{step}")))
    return {chart.name: chart for chart in run_charts.run_charts(run, history, seconds or {})}


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_the_first_and_the_last_line_of_a_learning_curve_have_bands_if_there_are_several_tasks(names):
    history = history_of(RETURNS, classes=[0, 0, 1, 1], names=names)
    if names:
        history = replace(
            history, by_class=[[replace(step, num_tasks=(9, 9)) for step in steps] for steps in history.by_class]
        )
    chart = run_charts.learning_chart("name", history)
    assert chart.title == "Learning curve of name"
    assert chart.y_label == ("class-balanced episode return" if names else "average episode return")
    first, between, last = chart.panels[0].series
    assert between.band is None
    for series, k in ((first, 0), (last, 2)):
        errors = RETURNS[:, k].reshape(2, 2, 2).std(axis=2, ddof=1) / np.sqrt(2)
        error = np.sqrt(np.square(errors).sum(axis=1)) / 2
        middle = np.quantile(RETURNS[:, k], [0.25, 0.75], axis=1)
        mean = RETURNS[:, k].mean(axis=1)
        np.testing.assert_allclose(series.band, (mean - error, mean + error) if names else middle)
    for tasks in (1, 2):
        first, *_ = run_charts.learning_chart("name", history_of(RETURNS[..., :tasks])).panels[0].series
        assert (first.band is None) is (tasks == 1)


@pytest.mark.parametrize(
    ("names", "last", "shown"), [(("a", "b"), 2, True), (("a",), 2, False), (("a", "b"), 0, False)]
)
def test_classes_have_panels_where_there_are_several_and_adaptation(names, last, shown):
    history = history_of(RETURNS[:, : last + 1], classes=[0, 0, 0, len(names) - 1], names=names)
    charts = charts_of(history)
    assert ("classes" in charts) is shown
    # With a single task in the second class, there is no standard error.
    assert charts["returns_by_class"].note.endswith(GAP_NOTE) is (len(names) > 1)


def test_points_of_tasks_need_several_tasks():
    for tasks in (1, 2):
        charts = charts_of(history_of(RETURNS[..., :tasks]))
        assert [*charts] == ["learning_curve", *["adaptation", "task_returns"] * (tasks > 1)]
    _, adaptation, by_iteration = charts.values()
    assert by_iteration.x_label == "iteration"
    np.testing.assert_array_equal(adaptation.x, RETURNS[1, 0, :2])
    np.testing.assert_array_equal(adaptation.panels[0].series[0].values, RETURNS[1, 2, :2])
    assert adaptation.note.startswith("one point per task of iteration 1: ")
    assert by_iteration.note.startswith("one point per task and iteration: ")
    assert [(series.label, series.color) for series in adaptation.panels[0].series] == [("tasks", AFTER)]
    history = history_of(RETURNS, classes=[0, 1, 1, 0], names=("a", "b"))
    colors = [series.color for series in charts_of(history)["adaptation"].panels[0].series]
    assert colors == [*CLASS_COLORS[:2]]


@pytest.mark.parametrize(
    ("iterations", "tasks", "shown"), [(150, 2, 100), (4, 6_667, 2), (4, 5_000, 4), (4, 20_000, 2)]
)
def test_of_many_iterations_some_have_points(iterations, tasks, shown):
    chart = charts_of(history_of(np.zeros((iterations, 1, tasks))))["task_returns"]
    assert len(chart.x) == shown * tasks


def test_trials_have_a_chart_where_their_last_episode_is_not_their_first():
    first, last = np.array([1.0, np.nan]), np.array([2.0, np.nan])
    for ends, shown in (((first, last), True), ((first, first.copy()), False), ((first,), False)):
        metrics = dict(zip(TRIAL_RETURNS, ends, strict=False))
        charts = [*run_charts.metric_lines(history_of(RETURNS, metrics))]
        assert [chart.name for chart in charts] == ["trial_returns"] * shown
        lines = [(series.label, series.values.tolist()[0]) for chart in charts for series in chart.panels[0].series]
        assert lines == [("first episode", 1), ("last episode", 2)][: 2 * shown]


def test_notes_of_updates_tell_what_was_recorded_of_them():
    def notes(*names):
        charts = run_charts.metric_lines(history_of(RETURNS, {name: np.ones(2) for name in names}))
        return [(chart.title, chart.note) for chart in charts]

    assert notes("loss_after") == [("Loss of the update", "On the iteration's episodes.")]
    ((_, note),) = notes("loss_before", "loss_after")
    assert note == "On the iteration's episodes; the gap is what the update gained on them."
    ((title, note),) = notes("meta_gradient_norm")
    assert title == "Norm of the meta-gradient"
    assert note.endswith("set algorithm.gradient_noise=true.")
    ((title, note),) = notes("meta_gradient_norm", "meta_gradient_standard_error")
    assert title == "Signal and noise of the meta-gradient"
    assert note.startswith("Where the norm is no larger than its standard error")


def evaluation_of(returns, episodes=1):
    """Mean test returns by task and adaptation step, each of one episode."""
    tasks, steps = np.shape(returns)
    shapes = {"test": (tasks, steps, 1), "adaptation": (tasks, steps - 1, episodes)}
    outcomes = {
        f"{kind}_{name}": np.zeros(shape, dtype)
        for kind, shape in shapes.items()
        for name, dtype in (("returns", np.float64), ("lengths", np.int32), ("terminated", np.bool_))
    }
    outcomes["test_returns"] += np.asarray(returns)[:, :, None]
    params = np.arange(tasks)[:, None] % 2.0
    return Evaluation(params, np.full(tasks, -1), ("goal",), ("m",), **outcomes)


@pytest.mark.parametrize(("episodes", "each"), [(1, "episode"), (2, "2 episodes"), (None, None)])
def test_a_chart_of_an_evaluation_tells_after_how_many_episodes_a_step_is(episodes, each):
    evaluation = evaluation_of(np.ones((4, 1 if each is None else 3)), episodes or 1)
    chart = run_charts.per_shot_chart("title", evaluation)
    start = f"an adaptation step after every {each}; " if each else ""
    assert chart.note == start + run_charts.INTERVAL_NOTE


def test_evaluations_have_bands_at_the_ends_and_count_iterations_where_steps_are_unknown():
    evaluations = {i: (steps, evaluation_of(RETURNS[0].T)) for i, steps in ((1, 100.0), (3, 300.0))}
    (chart,) = run_charts.evaluation_lines("name", evaluations, None)
    assert (chart.x.tolist(), chart.x_label, chart.wide) == ([100, 300], "environment steps of training", True)
    assert [series.band is None for series in chart.panels[0].series] == [False, True, False]
    evaluations[3] = float("nan"), evaluations[3][1]
    (chart,) = run_charts.evaluation_lines("name", evaluations, None)
    assert (chart.x.tolist(), chart.x_label) == ([1, 3], "iteration")


def test_stages_have_their_share_of_an_iteration_and_six_steps_have_a_layer_each():
    history = history_of(np.zeros((3, 1, 1)))
    seconds = {
        StageRef(0, "adapt", k): np.array(row) for k, row in enumerate([[1, 1, 4], [3, 3, 3], [np.nan, 6, np.nan]])
    }
    bars = charts_of(history, seconds)["stage_seconds"]
    # Medians, but the mean of what only some iterations have.
    assert [series.values.tolist() for series in bars.panels[0].series] == [[1], [3], [2]]
    assert [text.partition("  ")[2] for text in bars.texts] == ["(17%)", "(50%)", "(33%)"]
    for steps in (6, 7):
        seconds = {StageRef(0, "adapt", k): np.ones(3) for k in range(steps)}
        charts = charts_of(history, seconds)
        layers = charts["stage_seconds_by_iteration"].panels[0].series
        assert [layer.values.tolist() for layer in layers] == ([[1.0] * 3] * 6 if steps == 6 else [[7.0] * 3])
        assert all(len(s.values) == len(chart.x) for chart in charts.values() for s in chart.panels[0].series)


def estimate(value, width=0.1):
    return Estimate(value, value - width, value + width)


def test_a_comparison_has_its_groups_in_four_plots_and_its_first_pairs():
    steps = np.array([0.0, 50_000.0])
    names = [r"$\frac{", "_b", "c", "d", "e", "f"]
    groups = [
        SimpleNamespace(
            name=name,
            iqm=estimate(n, np.nan if n == 1 else 0.1),
            curve=Band(steps * n, steps * n - 1, steps * n + 1),
            profile=Band(steps + n, steps + n - 1, steps + n + 1),
        )
        for n, name in enumerate(names)
    ]
    pairs = [SimpleNamespace(a=a, b=b, improvement=estimate(0.75)) for n, a in enumerate(names) for b in names[n + 1 :]]
    found = SimpleNamespace(
        conditions=r"after $\frac{ steps", intervals="intervals", groups=groups, pairs=pairs,
        curve_steps=steps, thresholds=steps / 50_000,
    )  # fmt: skip
    figure = run_charts.comparison_figure(found)
    figure.draw_without_rendering()
    means, curves, profiles, improvements = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Interquartile mean",
        "Sample efficiency",
        "Performance profile",
        "Probability of improvement",
    ]
    assert figure.get_size_inches().tolist() == [11, 7.6]
    assert [text.get_text() for text in means.get_yticklabels()] == names
    assert [text.get_text() for text in improvements.get_yticklabels()][::11] == [
        "$\\frac{\nover _b",
        "c\nover f",
    ]
    assert len(improvements.get_yticks()) == 12
    # From the first at the top to the last; without an interval, there is no bar.
    assert means.get_ylim() == (5.5, -0.5)
    assert [line.get_xydata().tolist() for line in means.lines[:4]] == [
        [[-0.1, 0], [0.1, 0]], [[0, 0]], [[1, 1]], [[1.9, 2], [2.1, 2]]
    ]  # fmt: skip
    assert [line.get_ydata().tolist() for line in curves.lines] == [(steps * n).tolist() for n in range(6)]
    assert [line.get_ydata().tolist() for line in profiles.lines] == [(steps + n).tolist() for n in range(6)]
    assert [line.get_color() for line in curves.lines] == [*run_charts.COLORS[:6]]
    assert (improvements.get_xlim(), improvements.lines[-1].get_xdata()) == ((-0.02, 1.02), [0.5, 0.5])
    assert {line.get_color() for line in improvements.lines[:-1]} == {INK}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    # The look of the plots.
    (bar, dot), (middle,) = means.lines[:2], improvements.lines[-1:]
    assert [(line.get_linewidth(), line.get_alpha()) for line in (bar, middle)] == [(6, 0.35), (1, None)]
    assert dot.get_markersize() == 6
    title = figure.get_suptitle()
    sizes = {text.get_text(): text.get_fontsize() for text in figure.findobj(type(legend.get_texts()[0]))}
    assert (sizes[title], sizes["Sample efficiency"], sizes["c\nover f"], legend.get_texts()[0].get_fontsize()) == (
        9,
        11,
        8,
        9,
    )
    assert not means.yaxis.get_tick_params()["gridOn"]
    assert not legend.get_frame_on()
