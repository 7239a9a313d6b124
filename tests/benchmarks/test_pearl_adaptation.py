"""The benchmark's figures are those of evaluations, and its picture shows their episodes."""

import importlib.util
import re
import sys

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config

SMALL = [
    "iterations=2",
    "num_tasks=2",
    "max_episode_steps=5",
    "policy.hidden_sizes=[8]",
    "algorithm.critic_hidden_sizes=[8]",
    "algorithm.encoder_hidden_sizes=[8]",
    "algorithm.num_initial_steps=5",
    "algorithm.num_steps_prior=5",
    "algorithm.num_extra_rl_steps_posterior=5",
    "algorithm.num_updates=2",
    "algorithm.meta_batch_size=2",
    "algorithm.batch_size=4",
    "algorithm.embedding_batch_size=4",
    "algorithm.num_exp_traj_eval=2",
    "evaluation.every=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("pearl") / "run"
    train(build_config(override(load_settings("pearl-point-robot"), SMALL)), path, backend=Backend(workers=0))
    return path


@pytest.fixture
def benchmark(pytestconfig, monkeypatch):
    path = pytestconfig.rootpath / "benchmarks" / "pearl_adaptation.py"
    spec = importlib.util.spec_from_file_location("pearl_adaptation", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def printed(benchmark, monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["pearl_adaptation.py", *map(str, arguments)])
    benchmark.main()
    return capsys.readouterr().out


def test_the_rows_are_means_of_the_evaluations_of_training(benchmark, run, monkeypatch, capsys):
    text = printed(benchmark, monkeypatch, capsys, run, "--at", 1)
    rows = re.findall(
        r"^\| (\d) \| (\d) \| (\w+) \| (-[\d.]+) ± ([\d.]+) \| (-[\d.]+) ± [\d.]+ \|$", text, re.MULTILINE
    )
    assert [row[:3] for row in rows] == [
        (str(updates), str(k), belief) for updates in (1, 2) for k, belief in enumerate(("prior", "prior", "posterior"))
    ]
    for updates, k, _, mean, error, distance in rows:
        by_task = storage.open_run(run)[int(updates) - 1].evaluation().test_returns[:, int(k)].mean(axis=1)
        assert mean == distance == f"{by_task.mean():.2f}"
        assert error == f"{by_task.std(ddof=1) / 20**0.5:.2f}"
    stored = [storage.open_run(run)[i].evaluation().test_returns.mean(axis=2) for i in range(2)]
    for gain, told in (
        (stored[0][:, 2] - stored[0][:, 0], "after 1 updates, 2 context episodes against none"),
        (stored[1][:, 2] - stored[0][:, 2], "2 updates against 1, 2 context episodes"),
    ):
        assert f"{told}: return {gain.mean():.2f} ± {gain.std(ddof=1) / 20**0.5:.2f}, distance" in text
    assert "20 test tasks, 2 test episodes of each" in text


def test_terms_are_summed_over_episodes(benchmark, run):
    learner = benchmark.measure(run, None, 1, 3)
    columns = learner.columns(1)
    assert list(columns) == ["return", "distance"]
    goals, places = learner.outcome.tasks.params, learner.tests[1].observations[:, :, 1:]
    expected = -np.linalg.norm(places - goals[:, None, None], axis=-1).sum(axis=-1)
    np.testing.assert_allclose(columns["distance"], expected, rtol=1e-5)


def test_the_picture_has_every_path_and_every_goal(benchmark, run, monkeypatch, capsys, tmp_path):
    learner = benchmark.measure(run, None, 3, 8)
    panels = benchmark.picture("title", learner).axes
    assert [axes.get_title(loc="left").split(":")[0] for axes in panels] == ["by the prior", "after 3 context episodes"]
    for axes, k in zip(panels, (0, 3), strict=True):
        drawn = {line.get_xydata().tobytes() for line in axes.lines if len(line.get_xdata()) > 1}
        paths = learner.tests[k].observations.astype(np.float64)
        assert drawn == {path.tobytes() for path in paths.reshape(-1, 6, 2)}
        goals = [line.get_xydata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
        np.testing.assert_allclose(goals[::-1], learner.outcome.tasks.params)
    printed(benchmark, monkeypatch, capsys, run, "--tasks", 2, "--out", tmp_path / "paths.png")
    assert (tmp_path / "paths.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_or_drawn_is_refused(benchmark, run, tiny_run, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match="promp does not infer tasks"):
        printed(benchmark, monkeypatch, capsys, tiny_run)
    monkeypatch.setattr(benchmark, "GOAL", ("velocity",))
    with pytest.raises(SystemExit, match="in pearl-point-robot; expected positions"):
        printed(benchmark, monkeypatch, capsys, run, "--out", tmp_path / "paths.png")


def test_a_run_is_named_as_commands_name_it(benchmark, run, monkeypatch, capsys):
    by_path = printed(benchmark, monkeypatch, capsys, run, "--tasks", 2)
    monkeypatch.setenv("METALOOM_RUNS", str(run.parent))
    assert printed(benchmark, monkeypatch, capsys, run.name, "--tasks", 2) == by_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cv"], "cv: no such folder"),
        (["run", "--at", 9], "no learner after 9 updates; the run has completed only 2"),
        (["run", "--tasks", 0], "num_tasks=0"),
        (["run", "--out", "paths.gif"], "expected a .png, .svg or .pdf file"),
    ],
)
def test_what_no_command_could_do_is_one_line(benchmark, run, monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("METALOOM_RUNS", str(run.parent))
    with pytest.raises(SystemExit) as stopped:
        printed(benchmark, monkeypatch, capsys, *arguments)
    (line,) = str(stopped.value).splitlines()
    assert line.startswith("pearl_adaptation.py: ")
    assert said in line


@pytest.fixture
def tiny_run(tmp_path):
    settings = {"env": "point-corner", "iterations": 1, "num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4}
    train(build_config({**settings, "algorithm": {"name": "promp"}}), tmp_path / "promp", backend=Backend(workers=0))
    return tmp_path / "promp"
