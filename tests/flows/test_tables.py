import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from rich.text import Text

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import resume, train
from metaloom.flows.formatting import dotted, number
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.results.checks import Check, Verification
from metaloom.flows.results.disk import DiskUsage
from metaloom.flows.results.replay import ArrayDifference, Difference, RunDiff, StageReplay, difference_info
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import run_info, tables
from metaloom.flows.views.parts import as_text
from metaloom.flows.views.report import _subtitle
from metaloom.flows.views.run_info import bytes_by_group
from metaloom.pipeline.comparison.groups import Estimate
from metaloom.pipeline.comparison.scores import Scores
from metaloom.storage import Damage, StageRef

SERIAL = Backend(workers=0)


def text_of(renderable, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def row_with(renderable, name: str) -> str:
    return next(line for line in text_of(renderable).splitlines() if name in line)


@pytest.fixture(scope="module")
def runs_root(tmp_path_factory, tiny_config):
    """Three runs: one complete, one stopped in its second iteration, one damaged."""
    root = tmp_path_factory.mktemp("runs")
    train(tiny_config(iterations=2), root / "complete", backend=SERIAL)
    shutil.copytree(root / "complete", root / "damaged")
    (root / "damaged" / "run.json").write_text("{}")
    shutil.copytree(root / "complete", root / "stopped")
    for ref in (StageRef(1, "meta_optimize"), StageRef(1, "process_samples", 1)):
        (root / "stopped" / "_commits" / ref.file_name).unlink()
    (root / "not-a-run").mkdir()
    return root


@pytest.fixture
def complete(runs_root):
    return storage.open_run(runs_root / "complete")


def test_ls_lists_every_run_with_its_state(runs_root):
    rows = {row["name"]: row for row in [*map(run_info.list_run_row, storage.find_runs(runs_root))]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "complete": "complete",
        "stopped": "stopped",
        "damaged": "damaged",
    }
    assert (rows["stopped"]["iterations_done"], rows["stopped"]["iterations"]) == (1, 2)
    run = storage.open_run(runs_root / "complete")
    assert rows["complete"]["last_return"] == run[1].metrics()["step_1.average_return"]
    assert rows["complete"]["bytes"] == sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file())
    json.dumps(list(rows.values()), allow_nan=False)
    line = row_with(tables.runs_view(list(rows.values())), "stopped")
    assert line.split()[0] == "stopped"
    assert line.split()[3:9] == ["ago", "point-corner", "promp", "1", "/", "2"]


def test_ls_drops_columns_until_no_word_breaks(runs_root):
    row = run_info.list_run_row(runs_root / "complete") | {"name": "promp-half-cheetah-dir-20261125-171400"}
    ages = {"5 s ago": 5, "2 h ago": 7_300, "4 d ago": 400_000}
    moments = [(datetime.now(UTC) - timedelta(seconds=seconds)).isoformat() for seconds in ages.values()]
    table = tables.runs_view([{**row, "started": started} for started in (*moments, "never")])
    for width, shown in ((150, "started environment algorithm"), (90, "started iterations"), (80, "iterations")):
        header, _, *lines = text_of(table, width).splitlines()[1:7]
        assert " ".join(header.split()).startswith(f"run {shown}"), width
        assert [line.split()[0] for line in lines] == [row["name"]] * 4
        assert [age in line for age, line in zip(ages, lines, strict=False)] == ["started" in shown] * 3


def test_ls_of_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert [*map(run_info.list_run_row, storage.find_runs(tmp_path / "nowhere"))] == []


def test_a_run_that_is_being_written_shows_by_whom(tmp_path, tiny_config):
    path = tmp_path / "run"
    train(tiny_config(iterations=1), path, backend=SERIAL)
    assert storage.current_writer(path) is None
    with storage.open_writer(path):
        writer = storage.current_writer(path)
        assert writer is not None
        assert writer.pid == os.getpid()
        (row,) = [*map(run_info.list_run_row, storage.find_runs(tmp_path))]
        assert row["state"] == "training"
        assert f"run: process {os.getpid()} on" in text_of(tables.runs_view([row]))
    assert next(map(run_info.list_run_row, storage.find_runs(tmp_path)))["state"] == "complete"


def test_a_lock_left_by_a_process_that_is_gone_does_not_count_as_training(tmp_path, tiny_config):
    path = tmp_path / "run"
    train(tiny_config(iterations=1), path, backend=SERIAL)
    with storage.open_writer(path):
        owner = json.loads((path / "writer.lock").read_text())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (path / "writer.lock").write_text(json.dumps(owner | {"pid": pid}))
    assert storage.current_writer(path) is None
    (path / "writer.lock").write_text(json.dumps(owner | {"host": "another.example"}))
    assert storage.current_writer(path) is not None


def test_a_run_that_was_extended_shows_its_new_length(tmp_path, tiny_config):
    path = tmp_path / "run"
    train(tiny_config(iterations=1), path, backend=SERIAL)
    resume(path, iterations=2, backend=SERIAL)
    info = run_info.run_info(storage.open_run(path))
    assert (info["iterations_done"], info["iterations"], info["state"]) == (2, 2, "complete")


def test_show_run_has_progress_metrics_sizes_and_settings(complete):
    info = run_info.run_info(complete)
    assert (info["state"], info["iterations_done"], info["last_iteration"]) == ("complete", 2, 1)
    assert info["last_metrics"] == complete[1].metrics()
    assert sum(info["bytes"].values()) == bytes_by_group(complete).total()
    assert {"rollouts_0", "rollouts_1", "samples_0", "adapted_0", "learner", "tables", "records"} <= set(info["bytes"])
    json.dumps(info, allow_nan=False)
    view = text_of(tables.run_view(complete, everything=True))
    for part in (
        "point-corner",
        "4 tasks x 3 episodes x 10 steps, 1 inner step",
        "algorithm.inner_lr",
        "after adaptation",
        "metaloom.pipeline.envs.point_corner:PointCorner",
        "observation_size",
    ):
        assert part in view
    settings = dict(line.split(maxsplit=1) for line in view.splitlines() if line.strip().startswith("retention."))
    assert settings["retention.keep_last"].strip() == "null"


def test_show_run_has_the_settings_that_differ_from_the_defaults_unless_all_are_asked_for(complete, tmp_path):
    short = [line.split() for line in text_of(tables.run_view(complete)).splitlines()]
    config = dict(dotted(complete.config))
    shown = {words[0]: words[1] for words in short if len(words) == 2 and words[0] in config}
    for name in ("num_tasks", "iterations"):
        assert shown[name] == config[name]
    assert not shown.keys() & {"evaluation.seed", "retention.keep_last", "policy.activation", "algorithm.anneal_factor"}
    # Of algorithms of users, whose defaults only their code knows, all are shown.
    mine = {**complete.config, "algorithm": {"name": "nowhere:Mine", "inner_lr": 1.0}}
    assert run_info.changed_settings(mine) == list(dotted(mine))


def test_a_loss_that_is_zero_by_construction_is_explained(complete):
    for value, explained in ((-1.154e-08, True), (0.2, False)):
        shown = text_of(tables._metrics_view({"loss_before": value}))
        assert ("0 except for rounding" in shown) == explained


def test_show_iteration_lists_stages_in_the_order_of_writing_with_their_inputs(complete):
    info = run_info.iteration_info(complete, 1)
    assert [(stage["stage"], stage["step"]) for stage in info["stages"]] == [
        ("sample_tasks", 0),
        ("collect_rollouts", 0),
        ("process_samples", 0),
        ("adapt", 0),
        ("collect_rollouts", 1),
        ("process_samples", 1),
        ("meta_optimize", 0),
    ]
    assert info["complete"]
    json.dumps(info, allow_nan=False)
    line = row_with(tables.iteration_view(complete, 1), "collect_rollouts k=0  ")
    assert complete.record(StageRef(1, "collect_rollouts")).digest[:12] in line
    assert "meta_optimize i=0, sample_tasks" in line


def test_show_iteration_tells_when_it_is_not_complete_or_not_there(runs_root):
    stopped = storage.open_run(runs_root / "stopped")
    assert "not complete" in text_of(tables.iteration_view(stopped, 1))
    with pytest.raises(storage.StageMissing):
        run_info.iteration_info(stopped, 7)


def test_replay_lines_and_differences():
    ref = StageRef(3, "adapt", 0)
    difference = ArrayDifference(ref, "params.log_std", (2, 1), "0.5", "0.25", 0.25, 4_194_304, 17)
    reshaped = ArrayDifference(ref, "params.x", (), "float32[2]", "absent", float("inf"), None, -1)
    assert text_of(tables.replay_line(StageReplay(ref, (), 1.0))).strip() == "identical  iteration 3  adapt k=0"
    with_record = text_of(tables.replay_line(StageReplay(ref, (), 1.0, with_record=True)))
    assert with_record.endswith("adapt k=0  (thinned: compared with its record)\n")
    different = text_of(tables.replay_line(StageReplay(ref, (difference, reshaped), 1.0)))
    assert different.strip() == "different  iteration 3  adapt k=0  (2 arrays)"
    table = tables.difference_table([difference, reshaped])
    assert (
        " ".join(row_with(table, "log_std").split()) == "3 adapt k=0 params.log_std [2, 1] 0.5 0.25 0.25 4,194,304 17"
    )
    assert "shape or dtype" in row_with(table, "params.x")
    assert json.loads(json.dumps(difference_info(reshaped), allow_nan=False))["max_abs"] is None


def test_damage_names_file_iteration_stage_and_array():
    found = [
        Damage("data.zarr/rollouts_1/rewards/c.3.0.0.0", 3, "collect_rollouts", 1, "rewards", "is cut short"),
        Damage("run.json", None, None, None, None, "missing"),
    ]
    table = tables.verification_view(Verification(Path("run"), tuple(found)))
    assert "3   collect_rollouts k=1   rewards" in row_with(table, "c.3.0.0.0")
    assert row_with(table, "run.json").split() == ["run.json", "missing"]
    assert found[0].array == "rewards"


def test_recipes_are_listed_with_their_first_docstring_line():
    rows = {row["name"]: row for row in tables.recipe_rows()}
    assert rows["promp-half-cheetah-vel"]["env"] == "half-cheetah-vel"
    assert rows["promp-half-cheetah-vel"]["sizes"] == "40 tasks x 20 episodes x 100 steps, 1 inner step"
    until = "until 2,000 steps are reached"
    assert rows["ppo"]["sizes"] == f"1 task x at most 128 episodes x 1,000 steps, {until}"
    json.dumps(list(rows.values()), allow_nan=False)
    line = row_with(tables.recipes_table(list(rows.values())), "promp-half-cheetah-vel")
    assert rows["promp-half-cheetah-vel"]["about"] in line


def test_evaluation_shows_every_number_of_adaptation_steps(complete):
    outcome = evaluate(complete.path, adaptation_steps=2, test_episodes=1)
    view = text_of(tables.evaluation_table(outcome))
    assert "learner after 2 updates, 4 tasks" in view
    assert "1 test episode per task" in view
    assert f"{outcome.env_steps:,} environment steps, not counted as training" in view
    for k, step in enumerate(outcome.summary()):
        row = row_with(tables.evaluation_table(outcome), f"{number(step.iqm_low)} to {number(step.iqm_high)}")
        assert row.split()[:3] == [str(k), str(3 * k), number(step.average_return)]
        spans = (step.average_low, step.average_high), (step.lower_quartile, step.upper_quartile)
        assert all(f"{number(low)} to {number(high)}" in row for low, high in spans)


def test_an_evaluation_warns_of_steps_beyond_those_of_training(complete):
    for steps, warning in ((1, None), (2, "trained for 1 step; later rows extrapolate")):
        outcome = evaluate(complete.path, adaptation_steps=steps, test_episodes=1)
        assert outcome.as_dict()["extrapolation"] == warning
        for view in (text_of(tables.evaluation_table(outcome)), repr(outcome)):
            assert ("extrapolate" in view) == ((warning or "never") in view) == bool(warning)


def test_an_evaluation_of_some_of_a_set_of_tasks_says_of_how_many(complete):
    title = lambda outcome: tables.evaluation_table(outcome).title  # noqa: E731
    some = evaluate(complete.path, tasks="train", num_tasks=3, adaptation_steps=0, test_episodes=1)
    assert title(some) == "learner after 2 updates, 3 tasks (of 4)"
    assert "3 tasks (of 4), 1 test episode each" in repr(some)
    assert some.as_dict()["drawn_from"] == 4
    for more in (4, 5):
        outcome = evaluate(complete.path, tasks="train", num_tasks=more, adaptation_steps=0, test_episodes=1)
        assert title(outcome) == f"learner after 2 updates, {more} tasks"


def test_evaluation_by_a_single_episode_has_no_interval(complete):
    outcome = evaluate(complete.path, num_tasks=1, adaptation_steps=0, test_episodes=1)
    row = row_with(tables.evaluation_table(outcome), number(outcome.summary()[0].average_return))
    assert row.split()[3] == row.split()[5] == "-"
    info = outcome.as_dict()
    assert [info["adaptation"][0][name] for name in ("average_low", "average_high", "iqm_low", "iqm_high")] == [
        None
    ] * 4
    assert info["tasks"][0]["return_low"] is info["tasks"][0]["return_high"] is None
    json.dumps(info, allow_nan=False)


def test_evaluation_as_json_has_null_for_a_return_that_is_not_finite(complete, monkeypatch):
    outcome = evaluate(complete.path, num_tasks=1, adaptation_steps=0)
    rows = pa.table({"task": [0], "average_return": [float("inf")]})
    monkeypatch.setattr(type(outcome), "table", lambda self: rows)
    info = outcome.as_dict()
    assert info["tasks"] == [{"task": 0, "average_return": None}]
    json.dumps(info, allow_nan=False)


def test_doctor_shows_what_helps_and_what_failed_in_full_width():
    warned, failed = (
        Check("disk", status, f"[a] {'b ' * 30}c", "10 GB", "delete [c] runs") for status in ("warn", "fail")
    )
    assert "delete [c] runs" in row_with(tables.doctor_view([warned]), "disk")
    assert text_of(tables.doctor_view([failed])).splitlines()[-2:] == [
        f"disk: {failed.found}",
        "what helps: delete [c] runs",
    ]


def test_names_from_disk_reach_the_terminal_as_text(tmp_path):
    row = {"name": "[red]x[/red]\x1b[31m", "bytes": 1, "state": "damaged", "problem": "[bold]"}
    name = "[red]x[/red]\N{REPLACEMENT CHARACTER}[31m"
    assert name in row_with(tables.runs_view([row]), "damaged")
    assert f"{name}: [bold]" in text_of(tables.runs_view([row]))


def test_a_run_tells_which_implementation_computes_its_updates(tmp_path, capsys):
    settings = ["num_tasks=1", "iterations=1", "episodes_per_task=2", "max_episode_steps=4", "min_steps=null"]
    sets = [word for setting in settings for word in ("--set", setting)]
    for kernel, said in (("auto", "updates by fused, "), ("torch", "updates by torch, ")):
        path = str(tmp_path / kernel)
        asked = ["--set", "env=CartPole-v1", "--set", f"algorithm.kernel={kernel}", "--run", path, "--workers", "0"]
        assert cli.run(["train", "ppo", *asked, *sets]) == 0
        capsys.readouterr()
        assert cli.run(["show", path]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def test_a_style_is_applied_to_text_that_is_text_already():
    assert as_text(Text("loud"), "bold").style == "bold"
    assert as_text(Text("as it is", "red")).style == "red"


def test_tables_of_compared_runs_need_no_matplotlib():
    code = (
        "import sys; from metaloom.flows.operations import operations, resolve;"
        "resolve(operations()['compare'].view); print('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def cells_of(renderable, name: str) -> list[str]:
    return re.split(r"\s{2,}", row_with(renderable, name).strip())


def test_a_comparison_has_a_row_for_each_group_and_pair_and_the_verdicts_and_notes():
    scores = Scores((np.array([1.0, 2.0]), np.array([3.0, 4.0])), ("", ""), same_tasks=True)
    group = SimpleNamespace(name="one", scores=scores, iqm=Estimate(2.5, 2, 3), mean=Estimate(2.4, 1, 4))
    difference, better = Estimate(1.5, 0.5, 2.5), Estimate(0.85, 0.75, 1.0)
    pair = SimpleNamespace(a="first", b="second", difference=difference, improvement=better, adjusted_p=0.0123)
    found = SimpleNamespace(groups=[group], pairs=[pair], verdicts=["VERDICT"], notes=["NOTE"])
    found.conditions, found.intervals = "CONDITIONS", "INTERVALS"
    view = tables.comparison_view(found)
    assert cells_of(view, "one  ") == ["one", "2", "2.5", "2 to 3", "2.4", "1 to 4", "1.5 to 3.5"]
    assert cells_of(view, "first  ") == ["first", "second", "1.5", "0.5 to 2.5", "0.85", "0.75 to 1", "0.012"]
    words = " ".join(text_of(view).split())
    order = [words.index(part) for part in ("CONDITIONS", "INTERVALS", "on the same task", "VERDICT", "NOTE")]
    assert order == sorted(order)
    found.pairs, found.notes = [], []
    alone = text_of(tables.comparison_view(found))
    assert "VERDICT" in alone
    assert not {"P(a > b)", "notes"} & {*re.split(r"\s{2,}|\n", alone)}


def test_a_diff_tells_what_only_one_of_the_runs_has():
    settings = (Difference("seed", "1", None),)
    diff = RunDiff(Path("a"), Path("b"), settings, (), None, (), compared=3, different=0, only_a=1, only_b=2)
    view = tables.diff_view(diff)
    assert cells_of(view, "seed") == ["seed", "1", "-"]
    assert "0 of 3 outputs that both have differ; 1 is in a only; 2 are in b only\n" in text_of(view)
    assert text_of(tables.diff_view(replace(diff, settings=(), only_a=0, only_b=0))) == (
        "equal: all 3 outputs that both have\n"
    )


def test_a_fork_tells_what_it_shares_and_what_had_to_be_copied():
    fork = SimpleNamespace(path=Path("child"), iteration=1, shared_files=2, shared_bytes=2000)
    fork.copied_files, fork.copied_bytes = 0, 0
    view = tables.fork_view(fork, Path("parent"))
    assert cells_of(view, "begins with") == ["begins with", f"1 iteration of {storage.location(Path('parent'))}"]
    assert cells_of(view, "shared with it") == ["shared with it", "2 files, 2 kB"]
    assert cells_of(view, "continue with") == ["continue with", "metaloom resume ./child"]
    assert "copied" not in text_of(view)
    fork.copied_files, fork.copied_bytes = 1, 1000
    copied = cells_of(tables.fork_view(fork, Path("parent")), "copied")
    assert copied == ["copied", "1 file, 1 kB: the file system cannot share them"]


def test_an_interrupted_removal_is_told_even_where_there_is_no_run(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2000))
    left = tables.disk_view(DiskUsage([], [], [tmp_path], details=False))
    assert text_of(left) == "1 interrupted removal, 2 kB: `metaloom rm` finishes the removal\n"
    assert tables.disk_view(DiskUsage([], [], [], details=False)) == "no runs"


def test_of_a_vector_the_first_numbers_are_shown():
    numbers = [tables._numbers(value) for value in (None, 0.5, [1.0, None], [1.0, 2.0, 3.0, 4.0], [1.0] * 5)]
    assert numbers == ["-", "0.5", "1, -", "1, 2, 3, 4", "1, 1, 1, 1, ... (5)"]


@pytest.mark.parametrize(
    ("algorithm", "more", "shown"),
    [
        ({"inner_steps": 1}, {}, "1 task x 6 episodes x 10 steps, 1 inner step"),
        ({"episodes_per_trial": 2}, {"num_tasks": 2}, "2 tasks x 3 trials of 2 episodes x 10 steps"),
        (
            {},
            {"min_steps": 100, "min_rollouts": 2, "max_episode_steps": 1},
            "1 task x at most 6 episodes x 1 step, until 100 steps and 2 episodes are reached",
        ),
    ],
)
def test_sizes_of_a_run_are_those_of_an_iteration(algorithm, more, shown):
    sizes = {"num_tasks": 1, "episodes_per_task": 6, "max_episode_steps": 10, "min_steps": None}
    assert tables._sizes({"algorithm": algorithm, **sizes, **more}) == shown


def test_what_a_run_took_is_shown_beside_what_was_predicted():
    taken = {"memory_bytes": 2_000_000, "disk_bytes": 3000, "seconds": 61}
    assert tables._usage_line({"taken": taken, "predicted": None}) == "memory 2 MB, disk 3 kB, time 0:01:01"
    said = {"memory_bytes": 4000, "disk_bytes": 5000, "seconds": 3600, "after_iterations": 3}
    assert tables._usage_line({"taken": taken, "predicted": said}) == (
        "memory 2 MB (4 kB), disk 3 kB (5 kB), time 0:01:01 (1:00:00); in brackets, the prediction made after 3 "
        "iterations"
    )


def test_the_heading_of_a_report_names_settings_and_parent():
    config = {"algorithm": {"name": "sac"}, "env": {"name": "point"}, "seed": 3}
    run = SimpleNamespace(config=config, info={})
    assert _subtitle(run) == "sac on point, seed 3"
    run.info["parent"] = {"name": "first", "iteration": 7}
    assert _subtitle(run) == "sac on point, seed 3, forked from first@7: settings as below from iteration 7 on"
