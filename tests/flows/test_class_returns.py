"""Returns by class of task, in all places that show a run, and tasks that are drawn balanced."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from viewing import Viewer

import metaloom
from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import Observer, train
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import number
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.prefect_app.artifacts import iteration_line
from metaloom.flows.results.class_returns import (
    classes_of,
    classes_text,
    count_alike,
    episode_classes,
    headline_returns,
    mean_returns,
    official_success,
    plus_minus,
)
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import tables
from metaloom.flows.views.history import load_history
from metaloom.flows.views.progress import PlainLines, TrainingPanel, json_line
from metaloom.flows.views.report import learning_curve, report_page
from metaloom.flows.views.run_charts import BALANCED_NOTE, BAND_NOTE
from metaloom.flows.views.watching import Watch
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.estimation.statistics import ClassEstimate, class_returns

SERIAL = Backend(workers=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_config):
    """A run of two iterations with eight tasks, two of each corner, and what its observer was told."""
    path, told = tmp_path_factory.mktemp("runs") / "corners", []
    config = tiny_config(
        iterations=2,
        num_tasks=8,
        task_sampling="balanced",
        evaluation={"every": 2, "task_sampling": "balanced", "test_episodes": 2},
    )
    train(config, path, backend=SERIAL, observer=Observer(iteration_done=told.append))
    return metaloom.open_run(path), told


def test_every_place_shows_one_return_of_a_run_and_names_its_statistic(tmp_path, tiny_config):
    path, told = tmp_path / "runs" / "uneven", []
    train(tiny_config(iterations=2, num_tasks=24), path, backend=SERIAL, observer=Observer(iteration_done=told.append))
    run, history = metaloom.open_run(path), load_history(storage.open_run(path))
    assert {*history.by_class[-1][-1].num_tasks} != {6}
    balanced = by_hand(run, 1, 1)[0].mean()
    assert balanced != pytest.approx(run[1].metrics()["step_1.average_return"])
    viewer = Viewer(tmp_path / "runs")
    (row,) = viewer.get("runs")["runs"]
    assert (row["last_return"], row["last_return_is"]) == (pytest.approx(balanced), "class-balanced mean")
    assert viewer.get("run", "uneven", "spark")["values"][-1] == pytest.approx(balanced)
    (panel,) = viewer.get("run", "uneven", "curves")["charts"][0]["panels"]
    assert panel["series"][-1]["values"][-1] == pytest.approx(balanced)
    tiles = dict(report_page(storage.open_run(path), history).tiles)
    assert tiles["last return after adaptation, class-balanced mean"] == number(balanced)
    assert f"after {number(balanced)}  (class-balanced mean)" in iteration_line(told[-1])
    assert f"{number(balanced)} (class-balanced mean)" in run._repr_html_()


def test_a_run_whose_iterations_may_lack_a_class_shows_the_mean_of_tasks_as_drawn(tmp_path, tiny_config):
    path = tmp_path / "runs" / "few"
    train(tiny_config(iterations=1, num_tasks=5), path, backend=SERIAL)
    (row,) = Viewer(tmp_path / "runs").get("runs")["runs"]
    drawn = storage.open_run(path)[0].metrics()["step_1.average_return"]
    assert (row["last_return"], row["last_return_is"]) == (pytest.approx(drawn), "mean over tasks")
    table = path / "tables" / "episodes" / "00000000.parquet"
    table.write_bytes(table.read_bytes()[:-1])
    (row,) = Viewer(tmp_path / "runs").get("runs")["runs"]
    assert (row["state"], row["last_return"]) == ("complete", pytest.approx(drawn))


def by_hand(run, iteration, step):
    """Mean and standard error of each corner by pandas."""
    rows = run.episodes(iteration, step).to_pandas()
    tasks = rows.groupby(["task", "task_goal_x", "task_goal_y"])["return"].mean()
    corners = tasks.groupby(["task_goal_x", "task_goal_y"])
    return corners.mean().to_numpy(), corners.sem().to_numpy()


def test_the_table_has_every_class_and_the_mean_in_which_they_count_alike(trained):
    run, _ = trained
    found = run.class_returns().to_pandas().set_index(["iteration", "step", "class"])
    corners = ["lower left", "upper left", "lower right", "upper right"]  # in the order of their coordinates
    for i in (0, 1):
        for k in (0, 1):
            means, errors = by_hand(run, i, k)
            rows = found.loc[(i, k)].loc[corners]
            assert rows["num_tasks"].tolist() == [2, 2, 2, 2]
            np.testing.assert_allclose(rows["average_return"], means, rtol=1e-12)
            np.testing.assert_allclose(rows["standard_error"], errors, rtol=1e-9)
            balanced = found.loc[(i, k, "balanced")]
            assert balanced["average_return"] == pytest.approx(means.mean())
            assert balanced["standard_error"] == pytest.approx(np.sqrt(np.square(errors).sum()) / 4)


def test_whoever_watches_is_told_the_same_as_whoever_trains(trained):
    run, told = trained
    watched = Watch(run.path).look()
    assert len(watched) == len(told) == 2
    for report in watched:
        records = [run.record(ref) for ref in run.refs_of([report.iteration]) if ref.stage != run.stages.first]
        moments = [datetime.fromisoformat(record.started).timestamp() for record in records]
        end = max(moment + record.seconds for moment, record in zip(moments, records, strict=True))
        evaluating = sum(record.seconds for record in records if record.ref.stage == "evaluate")
        assert (evaluating > 0) is (report.iteration == 1)
        began = min(moments) if report.iteration == 0 else began  # noqa: F821
        assert report.elapsed_seconds == pytest.approx(end - began, abs=1e-5)
        steps = sum(run.episodes(report.iteration)["length"].to_pylist())
        assert report.steps_per_second == pytest.approx(steps / (end - min(moments) - evaluating), rel=1e-3)
    for here, there in zip(told, watched, strict=True):
        for a, b in zip(here.class_returns, there.class_returns, strict=True):
            assert a.names == b.names
            np.testing.assert_allclose(a.estimates, b.estimates, rtol=1e-12)


def test_progress_and_show_tell_the_classes(trained):
    run, (_, report) = trained
    estimate = report.class_returns[1].estimates[1]
    assert f"upper left {estimate.mean:.2f}" in PlainLines()(report)
    assert "+-" in PlainLines()(report)
    rows = json.loads(json_line(report))["class_returns"]
    assert len(rows) == 2 * 5
    assert rows[6] == {
        "step": 1, "class": "upper left", "num_tasks": 2,
        "average_return": estimate.mean, "standard_error": estimate.standard_error,
    }  # fmt: skip
    assert plus_minus(report.class_returns[1].balanced) in iteration_line(report)
    panel, out = TrainingPanel(clock=lambda: 0.0), io.StringIO()
    panel.iteration_done(report)
    for view in (panel, tables.run_view(run), tables.iteration_view(run, 1)):
        Console(file=out, width=160).print(view)
    assert out.getvalue().count(plus_minus(report.class_returns[1].balanced)) == 3
    np.testing.assert_allclose(
        [row["average_return"] for row in tables.run_info(run)["last_class_returns"]],
        [row["average_return"] for row in rows],
        rtol=1e-12,
    )


def test_the_report_draws_the_balanced_mean_only_where_every_class_was_drawn(trained, tmp_path, tiny_config):
    run, _ = trained
    history = load_history(run)
    figure = learning_curve("name", history)
    after = figure.axes[0].lines[1].get_ydata()
    np.testing.assert_allclose(after, [by_hand(run, i, 1)[0].mean() for i in (0, 1)], rtol=1e-12)
    assert BALANCED_NOTE in [text.get_text() for text in figure.axes[0].texts]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["before adaptation", "after adaptation", "± 1 standard error"]
    page = report_page(run, history)
    assert [heading for heading, _ in page.sections][:2] == ["By class of task", "Tasks"]
    (of_evaluation,) = [figures for heading, figures in page.sections if heading == "Evaluation"]
    assert "Evaluation of corners by class of task" in [figure.title for figure in of_evaluation]
    few = tmp_path / "few"
    train(tiny_config(iterations=1, num_tasks=3), few, backend=SERIAL)  # three tasks cannot be of four corners
    assert BAND_NOTE in [
        text.get_text() for text in learning_curve("few", load_history(metaloom.open_run(few))).axes[0].texts
    ]


def test_a_list_of_runs_with_classes_is_printed_without_pandas(trained):
    """Arrow imports it for many of its conversions to NumPy, joins and groups: half a second of every `ls`."""
    script = "import sys; from metaloom.flows.cli import run; run(['ls']); print('pandas' in sys.modules)"
    root = os.fspath(trained[0].path.parent)
    told = subprocess.check_output([sys.executable, "-c", script], env={**os.environ, "METALOOM_RUNS": root}, text=True)
    assert "corners" in told
    assert told.endswith("False\n")


def test_an_evaluation_tells_the_classes_too(trained):
    run, _ = trained
    outcome = evaluate(run.path, num_tasks=8, task_sampling="balanced", test_episodes=2, backend=SERIAL)
    rows = outcome.as_dict()["classes"]
    assert [row["num_tasks"] for row in rows] == [2, 2, 2, 2, 8] * 2
    after = outcome.evaluation.test_returns[:, 1].mean(axis=1)
    assert rows[-1]["adaptation_steps"] == 1
    assert rows[-1]["average_return"] == pytest.approx(after.mean())
    out = io.StringIO()
    Console(file=out, width=160).print(tables.evaluation_view(outcome))
    assert "lower right" in out.getvalue()
    labels = r"class +tasks +0 adaptation steps +1 adaptation step\n"
    assert re.search(labels, re.sub(" +\n", "\n", out.getvalue()))


def test_a_balanced_run_is_replayed_bit_for_bit(trained):
    run, _ = trained
    assert all(stage.identical for stage in replay(run.path, 1))


def test_what_is_shown_of_classes_changes_no_output(tmp_path, tiny_config, digests, monkeypatch):
    from metaloom.pipeline.envs.point_corner import PointCorner

    train(tiny_config(iterations=1), tmp_path / "with", backend=SERIAL)
    monkeypatch.setattr(PointCorner, "task_classes", None)
    train(tiny_config(iterations=1), tmp_path / "without", backend=SERIAL)
    assert digests(tmp_path / "with") == digests(tmp_path / "without")
    without = metaloom.open_run(tmp_path / "without")
    assert classes_of(without) is None
    assert load_history(without).by_class == []
    with pytest.raises(UsageError, match="declared no task classes"):
        without.class_returns()
    document = evaluate(without.path, num_tasks=1, test_episodes=1, backend=SERIAL).as_dict()
    assert (len(document["tasks"]), document["classes"], document["success"]) == (2, [], [])


def test_balanced_is_refused_before_a_run_is_made(tmp_path, tiny_config):
    no_classes = tiny_config(env={"name": "point-2d-goal"}, task_sampling="balanced")
    with pytest.raises(EnvError, match="task_sampling is balanced, but Point2DGoal declares no classes"):
        train(no_classes, tmp_path / "new", backend=SERIAL)
    # Small, or a machine with little room would refuse its size first.
    sizes = {"num_updates": 2, "meta_batch_size": 2, "critic_hidden_sizes": [4], "encoder_hidden_sizes": [4]}
    settings = {"algorithm": {"name": "pearl", **sizes}, "policy": {"hidden_sizes": [4]}, "num_tasks": 2}
    pearl = build_config({"env": "pearl-point-robot", **settings, "task_sampling": "balanced"})
    with pytest.raises(ConfigError, match="task_sampling must be uniform, got balanced: pearl"):
        train(pearl, tmp_path / "new", backend=SERIAL)
    assert not (tmp_path / "new").exists()


def test_an_estimate_without_an_error_is_its_mean_alone():
    assert plus_minus(ClassEstimate(2.5, float("nan"))) == "2.5"


def test_only_classes_that_tasks_were_drawn_of_are_named_while_training():
    names, classes = ("push", "reach", "sweep", "door"), np.array([2, 0, 2])
    drawn = class_returns(np.array([1.0, 2.0, 3.0]), classes, names)
    assert classes_text([drawn]) == "push 2, sweep 2, no task of 2 others"
    both = class_returns(np.array([1.0, 2.0, 3.0]), np.array([1, 0, 1]), names[:2])
    assert classes_text([both]) == "push 2, reach 2, balanced 2"


@pytest.mark.parametrize(
    ("counts", "alike"),
    [
        ([], False),
        ([(1, 1), (2, 2)], True),
        ([(1, 1), (2, 1)], False),
        ([(4, 3), (3, 4)], False),  # 2 x (1/2)^7: 1.6% of iterations lack a class
        ([(5, 3), (1, 7)], True),  # 2 x (1/2)^8: 0.8%
    ],
)
def test_classes_count_alike_where_iterations_rarely_lack_one(counts, alike):
    assert count_alike([[SimpleNamespace(num_tasks=of)] for of in counts]) == alike


def test_the_returns_of_an_algorithm_without_inner_steps_are_balanced_too():
    step = SimpleNamespace(num_tasks=(1, 1), balanced=SimpleNamespace(mean=2.0))
    assert headline_returns([1.0], [step]) == ([2.0], "class-balanced mean")


@pytest.mark.parametrize(
    ("facts", "episodes", "names", "official"),
    [
        (["success", "steps_until_success"], 3, ("goal",), {"official_success_rate": 1 / 3}),
        (["success", "steps_until_success"], 2, ("goal",), {}),
        (["success"], 3, ("goal",), {}),
        (["success", "steps_until_success"], 3, ("class",), {}),  # each in an environment of its own
    ],
)
def test_without_declared_classes_all_tasks_but_those_of_several_classes_have_one_official_rate(
    facts, episodes, names, official
):
    # Of 20 tasks, one succeeds once; three episodes count.
    success = np.zeros((20, 1, episodes))
    success[0, 0, 0] = 1
    known = {"success": success, "steps_until_success": 6 - 4 * success}
    evaluation = SimpleNamespace(
        task_ids=np.arange(20),
        names=names,
        task_params=np.arange(20)[:, None] % 2,
        test_facts={name: known[name] for name in facts},
        test_returns=success,
    )
    assert official_success(evaluation, 0, None) == pytest.approx(official)


def test_classes_of_a_run_that_nothing_of_ours_wrote_are_refused(tmp_path, copy_tiny_run, monkeypatch):
    run = metaloom.open_run(copy_tiny_run(tmp_path / "run"))
    (first,) = run.sessions()
    foreign = replace(first, environment={"task_classes": {"names": 3}})
    monkeypatch.setattr(type(run), "sessions", lambda self: [foreign])
    with pytest.raises(
        storage.IncompatibleFormat,
        match=r"session 0: task_classes: got .*expected task classes in the format of this version",
    ):
        run.class_returns()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_task_has_its_class_once_however_many_inner_steps_there_are(steps):
    classes = Classes(("x",), ("low", "high"), edges=(0.5,))
    places = [(i, k, b) for i in range(2) for k in range(steps) for b in range(3)]
    columns = dict(zip(("iteration", "step", "task"), zip(*places, strict=True), strict=True))
    values = [float(b > i) for i, _, b in places]
    table = pa.table({**columns, "task_x": values, "return": values})
    by_class, of = episode_classes(table, classes, mean_returns(table))
    assert of.tolist() == [[0, 1, 1], [0, 0, 1]]
    assert {i: len(found) for i, found in by_class.items()} == {0: steps, 1: steps}
    without = table.drop_columns(["task_x"])  # a custom graph may draw no tasks
    assert episode_classes(without, classes, mean_returns(without)) == ({}, None)


def test_several_runs_have_one_table(trained):
    run, _ = trained
    table = metaloom.Runs([run]).class_returns(0).to_pandas()
    assert table["run"].unique().tolist() == ["corners"]
    assert len(table) == 2 * 5
