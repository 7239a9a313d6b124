from dataclasses import replace

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.results.evaluation import summarize_classes, summarize_steps, summarize_tasks
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import charts
from metaloom.flows.views.charts import check_plot_file, write_plot
from metaloom.flows.views.history import evaluation_after, load_history, stage_seconds
from metaloom.flows.views.report import report_page, write_report
from metaloom.flows.views.run_charts import SECTIONS, curves, evaluation_lines, per_shot_chart, run_charts
from metaloom.pipeline.estimation.statistics import interquartile_mean


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    """Five iterations, evaluated after the second and the fourth."""
    path = tmp_path_factory.mktemp("plots") / "run"
    evaluation = {"every": 2, "adaptation_steps": 2, "episodes": 2, "test_episodes": 4}
    train(tiny_config(iterations=5, evaluation=evaluation), path, backend=Backend(workers=0))
    return storage.open_run(path)


def lines(figure) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}


def test_a_summary_is_of_the_test_episodes_alone(run):
    evaluation = run[3].evaluation()
    by_task = evaluation.test_returns.mean(axis=2)
    for k, step in enumerate(summarize_steps(evaluation)):
        assert step.average_return == pytest.approx(by_task[:, k].mean())
        assert step.iqm_return == pytest.approx(interquartile_mean(by_task[:, k]))
        assert step.average_low <= step.average_return <= step.average_high
        assert step.iqm_low <= step.iqm_return <= step.iqm_high
        first, second, third, last = sorted(by_task[:, k])
        assert step.lower_quartile == pytest.approx(0.25 * first + 0.75 * second)
        assert step.upper_quartile == pytest.approx(0.75 * third + 0.25 * last)
        assert step.adaptation_episodes == 2 * k
        assert step.adaptation_env_steps == 2 * k * 10
    poisoned = replace(evaluation, adaptation_returns=np.full_like(evaluation.adaptation_returns, 1e9))
    assert summarize_steps(poisoned) == summarize_steps(evaluation)


def test_every_task_has_a_row_for_every_number_of_steps(run):
    evaluation = run[3].evaluation()
    rows = summarize_tasks(evaluation)
    assert [(row["adaptation_steps"], row["task"]) for row in rows] == [(k, b) for k in range(3) for b in range(4)]
    assert [(row["adaptation_episodes"], row["adaptation_env_steps"]) for row in rows[::4]] == [
        (0, 0),
        (2, 20),
        (4, 40),
    ]
    row = rows[4 + 2]
    returns = evaluation.test_returns[2, 1]
    assert row["average_return"] == pytest.approx(returns.mean())
    assert returns.min() <= row["return_low"] <= row["average_return"] <= row["return_high"] <= returns.max()
    assert row["goal_x"] == evaluation.task_params[2, 0]
    assert row["next_adaptation_return"] == pytest.approx(evaluation.adaptation_returns[2, 1].mean())
    assert rows[-1]["next_adaptation_return"] is None


def test_the_curve_of_an_evaluation_is_over_adaptation_episodes(run):
    evaluation = run[3].evaluation()
    figure = charts.draw(per_shot_chart("title", evaluation))
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 2, 4]
    expected = [interquartile_mean(evaluation.test_returns[:, k].mean(axis=1)) for k in range(3)]
    np.testing.assert_allclose(lines(figure)["interquartile mean"], expected)
    assert "an adaptation step after every 2 episodes" in figure.axes[0].texts[0].get_text()


def test_the_curve_over_training_has_every_evaluation(run):
    assert [i for i in run.iterations if evaluation_after(run, i) is not None] == [1, 3]
    (chart,) = evaluation_lines("name", {i: evaluation_after(run, i) for i in (3, 1)}, None)
    assert chart.iterations.tolist() == [1, 3]
    figure = charts.draw(chart)
    assert list(lines(figure)) == ["before adaptation", "after 1 inner step", "after adaptation"]
    by_task = run[3].evaluation().test_returns[:, 2].mean(axis=1)
    assert lines(figure)["after adaptation"][1] == pytest.approx(interquartile_mean(by_task))


def test_a_report_shows_the_evaluations(run, tmp_path):
    html = write_report(run, tmp_path, static=True).html.read_text(encoding="utf-8")
    assert "<h2>Evaluation</h2>" in html
    history = load_history(run)
    of_evaluation = [chart for chart in run_charts(run, history) if chart.section == "Evaluation"]
    assert [chart.name for chart in of_evaluation] == ["evaluation", "evaluation_by_class", "evaluation_adaptation"]
    assert of_evaluation[0].x.tolist() == history.env_steps[[1, 3]].tolist()
    assert of_evaluation[0].iterations.tolist() == [1, 3]
    assert of_evaluation[2].title == "Adaptation after 4 updates"
    classes = summarize_classes(run[3].evaluation(), history.classes)[2]
    assert [series.values[1] for series in of_evaluation[1].panels[0].series] == [of.mean for of in classes.estimates]
    evaluations = {i: found for i in (1, 3) if (found := evaluation_after(run, i)) is not None}
    order = dict.fromkeys(chart.section for chart in curves("run", history, evaluations))
    assert [*order] == [section for section in SECTIONS if section in order]
    assert {"Return", "Evaluation", "Optimization"} <= {*order}
    seconds = stage_seconds(run, 5)[storage.StageRef(0, "evaluate")]
    assert np.isnan(seconds).tolist() == [True, False, True, False, True]
    computing = dict(report_page(run, history).tiles)["computing time (h:mm:ss)"]
    assert computing.count(":") == 2


def test_a_picture_is_a_png_an_svg_or_a_pdf(run, tmp_path):
    figure = charts.draw(per_shot_chart("title", run[1].evaluation()))
    for name, start in (("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml"), ("curve.pdf", b"%PDF")):
        check_plot_file(tmp_path / name)
        write_plot(tmp_path / name, figure)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"a \.png, \.svg or \.pdf file"):
        check_plot_file(tmp_path / "curve.jpg")
