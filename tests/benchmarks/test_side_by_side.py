"""Benchmarks beside another library: their statistics, and files that stand for runs made before."""

import importlib
import json
import sys

import pytest


@pytest.fixture
def load(pytestconfig, monkeypatch):
    """Import a module of the benchmarks, which import each other as scripts do."""
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")

    def import_again(name):
        for known in ("side_by_side", name):
            monkeypatch.delitem(sys.modules, known, raising=False)
        return importlib.import_module(name)

    return import_again


def test_means_have_the_interval_of_student_and_the_order_that_of_all_divisions(load):
    lines = load("side_by_side").compared_returns({"ours": [100, 200, 300], "theirs": [700, 800, 900]})
    # t = 4.3027 with 2 degrees of freedom, a standard error of 100 / sqrt(3): 248.4 to both sides.
    assert lines[2] == "| ours | 200 (-48 to 448) | 100, 200, 300 |"
    assert lines[3] == "| theirs | 800 (552 to 1048) | 700, 800, 900 |"
    # 20 divisions of six runs, of which this one and its mirror image are the furthest apart.
    assert lines[4] == "\np = 0.100 by a permutation test, of which the smallest is 0.100"


def test_of_one_program_no_order_is_told_and_of_one_seed_no_interval(load):
    compared = load("side_by_side").compared_returns
    assert len(compared({"ours": [100, 200, 300]})) == 3
    assert compared({"ours": [100], "theirs": [200]})[2:] == ["| ours | 100 | 100 |", "| theirs | 200 | 200 |"]


def test_only_the_file_of_an_ended_run_with_equal_settings_stands_for_it(load, tmp_path):
    side_by_side, path = load("side_by_side"), tmp_path / "seed.json"
    assert side_by_side.complete_row(path, {"steps": 5}) is None
    path.write_text(json.dumps({"steps": 5, "complete": False}))
    assert side_by_side.complete_row(path, {"steps": 5}) is None
    path.write_text(json.dumps({"steps": 5, "complete": True, "returns": [1.0]}))
    assert side_by_side.complete_row(path, {"steps": 5})["returns"] == [1.0]
    with pytest.raises(SystemExit, match=r"holds \{'steps': 5\}; expected \{'steps': 6\}.*--out"):
        side_by_side.complete_row(path, {"steps": 6})


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_a_seed_is_trained_once_and_then_read(load, tmp_path, monkeypatch, capsys, algorithm):
    single_task = load("single_task")
    other = {"lengths": [150, 150], "returns": [150.0, 150.0], "seconds": 1.0, "cpu_seconds": 1.0}
    monkeypatch.setitem(single_task.PROGRAMS, "stable-baselines3", lambda args, seed: other)
    settings = ["--env", "CartPole-v1", "--steps", "300", "--steps-per-update", "100", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["single_task.py", algorithm, *settings, "--plot", str(tmp_path / "a.png")])
    single_task.main()
    first = capsys.readouterr().out
    row = json.loads((tmp_path / f"{algorithm}_CartPole-v1_metaloom_seed1.json").read_text())
    assert sum(row["lengths"]) >= 300
    assert len(row["returns"]) == len(row["lengths"])
    assert (tmp_path / "a.png").exists()

    def refuse(args, seed):
        raise AssertionError("trained again")

    monkeypatch.setitem(single_task.PROGRAMS, "metaloom", refuse)
    single_task.main()
    assert capsys.readouterr().out == first
