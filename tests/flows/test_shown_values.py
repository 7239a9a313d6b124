"""How runs, iterations, batches and policies show themselves in a terminal and in a notebook."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import metaloom
from metaloom import storage
from metaloom.flows.operations import operations
from metaloom.flows.results.checks import Verification
from metaloom.flows.results.replay import ArrayDifference, Replay, StageReplay
from metaloom.flows.results.run_rows import Facts, Rows
from metaloom.flows.run_log import LogLine, LogLines
from metaloom.pipeline.shown import MOST_ROWS, as_html, as_text
from metaloom.pipeline.types import Samples, TaskBatch, TaskParams

EVIL = "<script>alert('x')</script>\x1b[2J"


@pytest.fixture(scope="module")
def run(copy_tiny_run, tmp_path_factory):
    return metaloom.open_run(copy_tiny_run(tmp_path_factory.mktemp("runs") / "first"))


def test_a_batch_shows_shapes_dtypes_and_sizes_of_its_arrays_and_none_of_their_numbers(run):
    episodes = run[0].rollouts(0)
    lines = repr(episodes).splitlines()
    assert lines[0] == "EpisodeBatch"
    words = [line.split() for line in lines]
    assert ["rewards", "[4,", "3,", "10]", "float32", "480", "B"] in words
    assert ["behavior.mean", "[4,", "3,", "10,", "2]", "float32", "960", "B"] in words
    assert len(lines) < 15
    html = episodes._repr_html_()
    assert ">rewards</td>" in html
    assert ">[4, 3, 10]</td>" in html
    assert len(html) < 4000


def test_tasks_show_their_fields_with_units(run):
    tasks = TaskBatch(np.zeros((2, 2)), np.zeros(2, np.int64), ("target", "load"), ("°C", "kg"))
    assert [line.split() for line in repr(tasks).splitlines()[1:]] == [
        ["params", "[2,", "2]", "float64", "32", "B"],
        ["ids", "[2]", "int64", "16", "B"],
        ["names", "target,", "load"],
        ["units", "°C,", "kg"],
    ]


def test_long_texts_are_cut_and_what_a_batch_does_not_have_is_left_out():
    tasks = TaskBatch(np.zeros((1, 1)), np.zeros(1, np.int64), ("n" * 60,), ("m" * 61,))
    assert repr(tasks).splitlines()[3:] == [f"  names   {'n' * 60}", f"  units   {'m' * 57}..."]
    assert len(repr(TaskBatch(np.zeros((1, 0)), np.zeros(1, np.int64))).splitlines()) == 1 + 2
    assert len(repr(Samples(*[np.zeros((1, 1, 1), np.float32)] * 4)).splitlines()) == 1 + 4


def test_a_learner_of_many_parameters_shows_the_first_and_counts_the_rest():
    params = TaskParams({f"layer_{n:02}": np.zeros((1, 2), np.float32) for n in range(100)})
    lines = repr(params).splitlines()
    assert len(lines) == 1 + 40
    assert (lines[39].split()[0], lines[40].strip()) == ("params.layer_38", "and 61 more")


def test_an_iteration_shows_its_stored_stages(run):
    lines = repr(run[1]).splitlines()
    assert lines[0] == f"Iteration 1 of {run.path}"
    assert [line.split("(")[0].strip() for line in lines[1:]] == [record.ref.stage for record in records(run, 1)]
    for record in records(run, 1):
        assert f">{len(record.arrays)} arrays</td>" in run[1]._repr_html_()


def records(run, iteration):
    return [run.record(ref) for ref in run.refs() if ref.iteration == iteration]


def test_a_run_shows_what_it_is_and_how_far_and_how_well_it_got(run):
    html = run._repr_html_()
    for text in ("promp", "point-corner", "3 of 3"):
        assert f">{text}</td>" in html
    assert "→" in html
    together = metaloom.open_runs(run.path)
    assert ">first</td>" in together._repr_html_()
    assert "3 of 3" in together._repr_html_()


def test_a_policy_shows_its_parameters(run):
    html = run.policy()._repr_html_()
    assert "TrainedPolicy(promp in point-corner)" in html
    assert ">log_std</td>" in html


def test_stored_text_is_neither_markup_nor_control_characters():
    for shown in (
        as_html(EVIL, [(EVIL, EVIL)]),
        TaskBatch(np.zeros((1, 1)), np.zeros(1, np.int64), (EVIL,), (EVIL,))._repr_html_(),
    ):
        assert "<script" not in shown
        assert "&lt;script&gt;" in shown
        assert "\x1b" not in shown
    assert "\x1b" not in as_text(EVIL, [(EVIL,)])


def test_a_forged_run_is_shown_as_text(run, monkeypatch):
    forged = {**run.info, "created": EVIL, "config": {"algorithm": {"name": EVIL}, "env": [EVIL]}}
    monkeypatch.setattr(run, "info", forged)
    html = run._repr_html_()
    assert html.count("&lt;script&gt;") == 3
    assert "<script" not in html
    assert "\x1b" not in html


def test_nothing_is_shown_with_colours_of_its_own(run):
    """So that dark pages stay legible."""
    for value in (run, run[0], run[0].rollouts(0), run[0].tasks(), run.policy()):
        html = value._repr_html_()
        assert "color" not in html.replace("color:inherit", "")
        assert "background" not in html


def test_showing_a_run_imports_neither_torch_nor_a_simulator(run):
    code = (
        "import sys, json, metaloom; run = metaloom.open_run(sys.argv[1]);"
        "[value._repr_html_() for value in (run, run[0], run[0].rollouts(0), run[0].update())];"
        "print(json.dumps(sorted({'torch', 'gymnasium', 'mujoco'} & {*sys.modules})))"
    )
    told = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == []


@pytest.fixture(scope="module")
def other(tiny_config, tmp_path_factory):
    """The same run with another seed."""
    return metaloom.train(tiny_config(seed=8), tmp_path_factory.mktemp("runs") / "second", progress=False)


RESULTS = {
    "compare": (
        lambda a, b, out: metaloom.compare([a, b]),
        ["Comparison by return", "too few seeds|one group", "promp"],
    ),
    "diff": (lambda a, b, out: metaloom.diff(a, b), ["RunDiff of first and second: first difference", "seed +7 +8"]),
    "ls": (lambda a, b, out: metaloom.ls(limit=2), ["no runs in|run"]),
    "show": (lambda a, b, out: metaloom.show(a), ["name +first", "config +20 values"]),
    "logs": (lambda a, b, out: metaloom.logs(b), ["info +iteration 2 "]),
    "graph": (lambda a, b, out: metaloom.graph(str(a.path)), ["adapt"]),
    "replay": (lambda a, b, out: metaloom.replay(a, 1), ["^Replay of 7 stages: all identical$"]),
    "optimize": (lambda a, b, out: metaloom.optimize(a, 1, seed=3), ["Counterfactual of meta_optimize"]),
    "doctor": (lambda a, b, out: metaloom.doctor(env="point-corner"), ["Checks: all is well", "ok"]),
    "evaluate": (lambda a, b, out: metaloom.evaluate(a, num_tasks=1, episodes=1), ["EvaluationOutcome"]),
    "verify": (lambda a, b, out: metaloom.verify(a), ["^Verification of .*first: every file is intact$"]),
    "du": (lambda a, b, out: metaloom.du(a), ["Disk usage of 1 run", "first .* kB"]),
    "thin": (lambda a, b, out: metaloom.thin(b, keep_last=1, dry_run=True), ["ThinnedRun"]),
    "pack": (lambda a, b, out: metaloom.pack(b), ["Packed"]),
    "rm": (lambda a, b, out: metaloom.rm(), ["Removed"]),
    "export": (
        lambda a, b, out: metaloom.export(a, to="parquet", out=out / "parquet"),
        [r"iterations=3, .*skipped=\[\]\)$"],
    ),
    "policy": (lambda a, b, out: metaloom.policy(a, out=out / "a.safetensors"), ["TrainedPolicy"]),
    "report": (lambda a, b, out: metaloom.report(a, out=out / "report"), ["ReportFiles"]),
    "video": (lambda a, b, out: metaloom.video(a, out / "film.gif"), ["Film"]),
    "cancel": (lambda a, b, out: metaloom.cancel(b), ["complete: 3 of 3"]),
    "watch": (lambda a, b, out: metaloom.watch(b), ["complete: 3 of 3"]),
    "recipes": (lambda a, b, out: metaloom.recipes(), ["promp"]),
}
"""Calls of the operations that return neither runs nor nothing, and what their results show."""
TABLES = {"compare", "diff", "ls", "show", "logs", "replay", "optimize", "doctor", "evaluate", "verify", "du"}


def test_every_operation_that_returns_a_result_is_among_these():
    other = {"train", "resume", "fork", "sweep", "view", "serve", "reference"}
    assert {*RESULTS} == {*operations()} - other


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_what_it_is_and_no_array(name, run, other, tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    call, expected = RESULTS[name]
    result = call(run, other, tmp_path)
    shown = repr(result)
    assert len(shown) < 2500
    assert "array(" not in shown
    for text in expected:
        assert re.search(text, shown, re.MULTILINE), shown
    assert (name in TABLES) == ("<table" in getattr(result, "_repr_html_", str)()) or name == "policy"


def test_a_long_fact_is_cut_and_several_values_are_counted():
    found = Facts({"a": "x" * 60, "b": "y" * 61, "c": [1], "d": {"one": 1, "two": 2}, "e": None})
    cut = f"{'y' * 57}..."
    rows = [("a", "x" * 60), ("b", cut), ("c", "1 value"), ("d", "2 values"), ("e", "None")]
    assert found.shown() == ("5 facts", rows)


def test_a_list_of_runs_has_a_row_for_each_with_its_return_if_it_has_one():
    trained = {"name": "a", "env": "ant", "algorithm": "ppo", "iterations_done": 2, "iterations": 3, "state": "killed"}
    title, (_, *rows) = Rows([trained | {"last_return": 1.5}, {"name": "b", "state": "damaged"}]).shown()
    assert title == "2 runs"
    assert rows == [("a", "ant", "ppo", "2", "3", "killed", "1.5"), ("b", "", "", "", "", "damaged", "")]
    assert Rows().shown() == ("", [])


def test_of_a_long_log_the_newest_lines_are_shown():
    lines = [LogLine("2026-11-27T15:00:07.123+00:00", "info", f"line {n}", {}) for n in range(MOST_ROWS + 2)]
    title, rows = LogLines(lines).shown()
    assert title == f"{MOST_ROWS + 2} lines, the last {MOST_ROWS}"
    assert rows == [("2026-11-27 15:00:07", "info", f"line {n}") for n in range(2, MOST_ROWS + 2)]
    assert LogLines(lines[:1]).shown()[0] == "1 line"


def test_a_replay_that_differs_and_a_damaged_run_show_where(run):
    ref = run.refs()[0]
    different = ArrayDifference(ref, "params.w", (0,), "1.0", "2.0", 1.0, 3, 12)
    shown = repr(Replay([StageReplay(ref, (different,), 0.1), StageReplay(ref, (), 0.1)]))
    assert shown.splitlines()[0] == "Replay of 2 stages: 1 differ"
    assert "params.w  12 values  by up to 1" in shown
    assert repr(Replay([StageReplay(ref, (), 0.1)])).splitlines()[0] == "Replay of 1 stage: all identical"
    assert Replay().shown() == ("Replay of 0 stages: 0 differ", [])
    damage = storage.Damage("records/a.json", 0, None, None, None, "missing")
    assert "1 file damaged\n  records/a.json  missing" in repr(Verification(run.path, (damage,)))
