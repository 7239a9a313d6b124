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
from metaloom.flows.recipes import RECIPES
from metaloom.flows.results.checks import Check, Verification
from metaloom.flows.results.disk import DiskUsage, DiskUse
from metaloom.flows.results.replay import ArrayDifference, Difference, RunDiff, StageReplay, difference_info
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import run_info, tables
from metaloom.flows.views.parts import as_text
from metaloom.flows.views.report import _subtitle
from metaloom.flows.views.run_info import bytes_by_group
from metaloom.pipeline.comparison.groups import Estimate
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.config.sections import StoppingConfig
from metaloom.pipeline.envs import REPRODUCED
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
    columns = "run started environment algorithm iterations last return"
    header = row_with(tables.runs_view(list(rows.values())), "environment")
    assert " ".join(header.split()) == f"{columns} on disk state"
    successes = tables.runs_view([{**rows["stopped"], "last_success_rate": 0.125}, rows["damaged"]])
    assert " ".join(row_with(successes, "environment").split()) == f"{columns} success rate on disk state"
    assert "0.125" in row_with(successes, "stopped")


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
    assert "env.name" not in shown
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
    assert complete.record(StageRef(1, "collect_rollouts")).digest[:12] in line.split()
    assert "meta_optimize i=0, sample_tasks" in line
    assert "average_return" in text_of(tables.iteration_view(complete, 1))


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
        Damage("folder", 4, "adapt", None, None, "absent"),
    ]
    table = tables.verification_view(Verification(Path("run"), tuple(found)))
    assert "3   collect_rollouts k=1   rewards" in row_with(table, "c.3.0.0.0")
    assert row_with(table, "run.json").split() == ["run.json", "missing"]
    assert row_with(table, "folder").split() == ["folder", "4", "adapt", "k=0", "absent"]
    assert row_with(table, "file ").split() == ["file", "iteration", "stage", "array", "problem"]
    assert found[0].array == "rewards"


def test_recipes_are_listed_with_their_first_docstring_line():
    rows = {row["name"]: row for row in tables.recipe_rows()}
    assert rows["promp-half-cheetah-vel"]["env"] == "half-cheetah-vel"
    assert rows["promp-half-cheetah-vel"]["sizes"] == "40 tasks x 20 episodes x 100 steps, 1 inner step"
    until = "until 2,000 steps are reached"
    assert rows["ppo"]["sizes"] == f"1 task x at most 128 episodes x 1,000 steps, {until}"
    json.dumps(list(rows.values()), allow_nan=False)
    line = row_with(tables.recipes_table(list(rows.values())), "promp-half-cheetah-vel")
    assert rows["ppo"]["about"] == RECIPES["ppo"].about.splitlines()[0] != ""
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
    assert "0 adaptation steps" in text_of(tables.evaluation_view(outcome))
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
    header = row_with(tables.doctor_view([warned]), "required")
    assert header.split() == ["check", "found", "required", "what", "helps"]
    assert text_of(tables.doctor_view([failed])).splitlines()[-2:] == [
        f"disk: {failed.found}",
        "what helps: delete [c] runs",
    ]


def test_names_from_disk_reach_the_terminal_as_text(tmp_path):
    row = {"name": "[red]x[/red]\x1b[31m\ny", "bytes": 1, "state": "damaged", "problem": "[bold]\ny"}
    name = "[red]x[/red]\N{REPLACEMENT CHARACTER}[31m\\ny"
    assert name in row_with(tables.runs_view([row]), "damaged")
    assert rf"{name}: [bold]\ny" in text_of(tables.runs_view([row]))
    use = DiskUse(str(row["name"]), "run", num_bytes=1, only_remote=0, shared=0, stages={"adapt": 1})
    shown = text_of(tables.disk_view(DiskUsage([use], [tmp_path / "run"], [], details=True)))
    assert f"\n {name} " in shown
    assert f"{name}, by stage" in shown


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
    assert lines_of(view)[:2] == ["settings", "a b"]
    # The names of the runs are above their values.
    assert row_with(view, " a ").index("a") == row_with(view, "seed").index("1")
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


def lines_of(renderable) -> list[str]:
    """The lines of a view without its rules, with one space between words."""
    lines = (" ".join(line.split()) for line in text_of(renderable).splitlines())
    return [line for line in lines if line.strip("- ")]


def line_above(renderable, name: str) -> str:
    lines = text_of(renderable).splitlines()
    return lines[lines.index(row_with(renderable, name)) - 1]


def test_a_run_shows_all_that_was_recorded_of_it(complete, monkeypatch):
    info = run_info.run_info(complete)
    (when, moment) = ("2026-01-02T03:04:05.678+00:00", "2026-01-02 03:04:05")
    versions = {"versions.torch": ("1.0", None), "code": ("ab" * 32, "cd" * 32)}
    place = {"iteration": 2, "stage": "adapt", "step": 1, "when": when, "path": "_quarantine/x", "message": "WHY"}
    info |= {
        "config": {
            name: complete.config[name] for name in ("env", "algorithm", "num_tasks", "episodes_per_task", "seed")
        }
        | {"max_episode_steps": 10},
        "created": when,
        "writer": "[process] 7",
        "state": "training",
        "environment": {"kernel": {"name": "fused", "threads": 2}, "env": {"copies": 3}},
        "witness": {"replayed": 4, "reproduced": 3},
        "parent": {"name": "first", "iteration": 7},
        "thinned_iterations": 1,
        "usage": {"taken": {"memory_bytes": 1000, "disk_bytes": 2000, "seconds": 61}, "predicted": None},
        "last_metrics": {"step_0.average_return": 1.0, "step_1.average_return": 2.0, "lr": 0.5},
        "last_class_returns": [],
        "bytes": {"learner": 1000, "records": 2000},
        "sessions": [{"session": 1, "started": when, "changed": versions}],
        "quarantine": [{**place, "stored_since": False}, {**place, "stored_since": True}],
    }
    monkeypatch.setattr(tables, "run_info", lambda run: info)
    monkeypatch.setattr(tables, "changed_settings", lambda config: [("seed", "5")])
    facts = [
        "complete",
        "path there",
        "state training ([process] 7)",
        "iterations 2 / 2",
        f"created {moment} UTC",
        "environment point-corner",
        "algorithm promp",
        "sizes 4 tasks x 3 episodes x 10 steps, 1 inner step",
        f"seed {complete.config['seed']}",
        "on disk 3 kB",
        "took memory 1 kB, disk 2 kB, time 0:01:01",
        "updates by fused, 2",
        "witness 4 episodes played again, 3 reproduced bit for bit",
        "forked from first@7",
        "thinned 1 iteration",
        "metrics of iteration 1",
        "by inner step before adaptation after adaptation",
        "average_return 1 2",
        "lr 0.5",
    ]
    sizes = [
        "on disk",
        "group size",
        "learner 1 kB",
        "records 2 kB",
        "all 3 kB",
        "environment, with defaults",
        "copies 3",
    ]
    others = [
        "sessions with other versions, sources or hardware",
        "session since what before after",
        f"1 {moment} versions.torch 1.0 -",
        f"code {'ab' * 6} {'cd' * 6}",
        "quarantine: stored stage failures",
        "when iteration stage what kept in",
        f"{moment} 2 adapt k=1 WHY _quarantine/x",
        f"{moment} 2 adapt k=1 WHY _quarantine/x stored since",
    ]
    short, everything = (lines_of(tables.run_view(complete, path="there", everything=all_)) for all_ in (False, True))
    assert short == [*facts, *others, "settings that differ from the defaults (--all shows all)", "seed 5"]
    settings = [f"{name} {value}" for name, value in dotted(info["config"])]
    assert everything == [*facts, *sizes, *others, "settings", *settings]
    info |= {"iterations_done": 1, "writer": None}
    told = lines_of(tables.run_view(complete))
    assert [line for line in told if line.startswith(("path", "state", "took"))] == [
        f"path {storage.location(complete.path)}",
        "state training",
        "took so far memory 1 kB, disk 2 kB, time 0:01:01",
    ]


def test_an_output_shows_what_it_was_computed_from_and_its_arrays():
    inputs = [{"stage": "adapt", "step": 0, "iteration": i} for i in (3, 2)]
    span = {
        "first": {"iteration": 0},
        "last": {"iteration": 2},
        "stages": ["fill", "collect"],
        "outputs": 3,
        "steps": 0,
    }
    array = {
        "name": "rewards",
        "dims": ["task", "t"],
        "shape": [4, 10],
        "dtype": "float32",
        "unit": "m",
        "description": "D",
    }
    info = {
        "run": "RUN", "iteration": 3, "stage": "collect", "step": 1, "seconds": 1.5, "thinned": False, "bytes": 2000,
        "digest": "0123456789abcdef", "inputs": inputs, "spans": [span, {**span, "steps": 1, "outputs": 1}],
        "arrays": [array, {"name": "mask", "problem": "LOST"}], "output": "Rollouts", "description": "episodes",
    }  # fmt: skip
    spans = "all fill and collect i=0-2 (3 outputs), all fill and collect i=0-2 (1 output with 1 step)"
    computed = f"adapt k=0, adapt k=0 i=2, {spans}"
    expected = [
        "RUN, iteration 3",
        "stage seconds on disk digest computed from",
        f"collect k=1 1.500 2 kB 0123456789ab {computed}",
        "Rollouts: episodes",
        "array axes dtype unit meaning",
        "rewards task 4, t 10 float32 m D",
        "mask LOST",
    ]
    assert lines_of(tables.output_view(info)) == expected
    thinned = lines_of(tables.output_view({**info, "thinned": True, "description": ""}))
    assert thinned[2:4] == [expected[2].replace("2 kB", "thinned"), "Rollouts"]


def test_success_is_shown_after_the_last_adaptation_step():
    assert tables.success_view([]) == []
    rows = [
        {
            "adaptation_steps": k,
            "class": name,
            "num_tasks": 2,
            "success_rate": 0.25 * k + share,
            "official_success_rate": share,
        }
        for k in (0, 1)
        for name, share in (("push", 0.5), ("reach", 0.75), ("balanced", 0.625))
    ]
    heading, table = tables.success_view(rows)
    assert lines_of(heading) == ["success by class of task, after 1 adaptation step"]
    assert lines_of(table)[:4] == [
        "class tasks success rate official success rate", "push 2 0.75 0.5", "reach 2 1 0.75", "balanced 2 0.875 0.625"
    ]  # fmt: skip
    assert "upwards" in text_of(table)
    assert (line_above(table, "reach").split()[0], line_above(table, "balanced").strip("- ")) == ("push", "")
    (*_, table) = tables.success_view([{"adaptation_steps": 0, "class": "all", "num_tasks": 1, "success_rate": 0.0}])
    assert lines_of(table) == ["class tasks success rate", "all 1 0"]


def test_returns_by_class_have_a_column_for_each_step():
    rows = [
        {"step": k, "class": name, "num_tasks": 2, "average_return": k + value, "standard_error": None if k else 0.5}
        for k in (0, 1)
        for name, value in (("push", 1.0), ("balanced", 2.0))
    ]
    heading, table = tables._classes_view(rows)
    assert lines_of(heading) == ["return by class of task"]
    returns = ["push 2 1 ± 0.5 2", "balanced 2 2 ± 0.5 3"]
    assert lines_of(table)[:3] == ["class tasks before adaptation after adaptation", *returns]
    assert line_above(table, "balanced").strip("- ") == ""
    _, table = tables._classes_view(rows, ["A", "B"])
    assert lines_of(table)[:3] == ["class tasks A B", *returns]
    _, table = tables._classes_view(rows[:1])
    assert lines_of(table)[:2] == ["class tasks return", "push 2 1 ± 0.5"]


def test_metrics_by_inner_step_begin_with_the_return():
    metrics = {
        "step_0.entropy": 3.0,
        "step_0.average_return": 1.0,
        "step_1.average_return": None,
        "own.part": 4.0,
        "9": 5.0,
    }
    view = tables._metrics_view(metrics)
    assert lines_of(view) == [
        "by inner step before adaptation after adaptation", "average_return 1 -", "entropy 3", "own.part 4", "9 5"
    ]  # fmt: skip
    # Names never break.
    assert "average_return" in text_of(view, width=30)


@pytest.mark.parametrize(
    ("value", "explained"), [(None, False), (0.0, False), (1e-6, True), (-1e-6, True), (1.5e-6, False)]
)
def test_a_loss_is_zero_up_to_a_millionth(value, explained):
    assert tables.meaning("loss_before", value).startswith("(0 except") is explained
    assert tables.meaning("loss_after", value) == ""


ADAPT = StageRef(3, "adapt")


def counterfactual(changed, seconds, *, identical=False, first=ADAPT, settings=("lr=1",)):
    """A stage that took one second with its run's settings, which had a quantity x of 1."""
    stored = SimpleNamespace(seconds=1.0, identical=True)
    outcome = SimpleNamespace(settings=settings, seconds=seconds, identical=identical, digests={ADAPT: ""})
    quantities = {
        "x": (1.0, changed),
        "same": (2.0, 2.0),
        "loss_before": (1e-9, changed - 2),
        "seconds": (1.0, seconds),
    }
    return SimpleNamespace(
        ref=ADAPT, stored=stored, changed=outcome, first_changed=first,
        quantities=lambda: quantities, distance=lambda: {"max_distance": changed},
    )  # fmt: skip


def test_a_changed_stage_stands_beside_the_stored_one():
    result = counterfactual(1.5, 2.0)
    table = tables.counterfactual_table(result)
    table.caption, (first, second, third) = None, table.caption.split("; ")
    assert (first, second) == ("apart: max distance 1.5", "the first stage that changes is adapt k=0")
    assert third == "with the run's own settings the stage reproduces the stored output"
    assert lines_of(table) == [
        "iteration 3, adapt k=0: lr=1",
        "as in the run changed",
        "x 1 1.5",
        "same 2 2",
        "loss_before 1e−09 −0.5",
        "time 1 s 2 s",
    ]
    changed = [*table.columns[2].cells]
    assert [text.style for text in changed[:3]] == ["bold", "", "bold"]
    result.stored.identical = False
    assert "does NOT reproduce" in tables.counterfactual_table(result).caption
    nothing = tables.counterfactual_table(counterfactual(1.0, 2.0, identical=True, first=None, settings=()))
    assert lines_of(nothing)[0] == "iteration 3, adapt k=0: no change"
    assert nothing.caption.startswith("identical to what is stored; with the run's own settings")
    result = counterfactual(1.0, 2.0, identical=True, first=None)
    assert "none of the recomputed stages (adapt k=0) is affected" in tables.counterfactual_table(result).caption
    both = {"loss_before": (1e-9, 1e-8)}
    result.quantities = lambda: both
    assert "0 except for rounding" in text_of(tables.counterfactual_table(result))


@pytest.mark.parametrize("count", [1, 2])
def test_a_grid_has_a_column_for_what_its_settings_change(count):
    results = [counterfactual(1.5 + n, 2.0 + n, settings=(f"lr={n}",)) for n in range(count)]
    rows = ["lr=0 1.5 −0.5 1.5 2 s", "lr=1 2.5 0.5 2.5 3 s"][:count]
    table = tables.grid_table(results)
    assert table.caption == "with the run's own settings the stage reproduces the stored output"
    table.caption = None
    assert lines_of(table) == [
        "iteration 3, adapt k=0",
        "settings x loss_before max_distance time",
        "as in the run 1 1e−09 1 s",
        *rows,
    ]


def test_transitions_of_a_minibatch_have_their_origin():
    row = {
        "memory": 5, "row": 0, "iteration": 2, "stage": "collect_rollouts", "step": 1, "task": 3, "episode": 4, "t": 6,
        "observation": [1.0, 2.0], "action": [0.5], "reward": -1.0, "next_observation": [3.0], "terminated": True,
    }  # fmt: skip
    info = {"run": "RUN", "iteration": 2, "update": 7, "num_updates": 9, "context": False, "tasks": [3, 8]}
    info |= {"rows_per_task": 16, "transitions": [row, {**row, "terminated": False, "row": 1}]}
    assert lines_of(tables.minibatch_view(info)) == [
        "RUN, iteration 2, minibatch of gradient step 7 of 9: 2 x 16 transitions",
        "buffer row iteration stage task episode t observation action reward next observation terminated",
        "5 0 2 collect_rollouts k=1 3 4 6 1, 2 0.5 -1 3 yes".replace("-1", "−1"),
        "5 1 2 collect_rollouts k=1 3 4 6 1, 2 0.5 -1 3".replace("-1", "−1"),
        "2 of 32 transitions; --rows FROM:TO shows others",
    ]


def test_parameters_are_shown_by_their_statistics():
    table = tables.parameters_table({"baseline": {"weights": np.array([[1.0, 2.0, 6.0]])}})
    assert lines_of(table) == ["baseline parameter shape mean smallest largest", "baseline weights 1 x 3 3 1 6"]


def test_disk_usage_has_a_row_for_each_run_and_its_parts(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_bytes(bytes(3000))
    parts = {"groups": {"learner": 1000}, "stages": {"adapt": 2000}, "ranges": {(0, 9): 4000}}
    whole = DiskUse("run", "run", num_bytes=3000, only_remote=0, shared=5000, thinning=6000, **parts)
    broken = DiskUse("broken", "run", num_bytes=3000, only_remote=1, shared=0, problem="DAMAGED")
    remote = DiskUse("remote", "run", num_bytes=3000, only_remote=1000, shared=0)
    usage = DiskUsage([whole, broken, remote], [tmp_path / "run"] * 3, [], details=True)
    header = "run on disk shared with forks freed by thinning freed by removing"
    rows = ["run 3 kB 5 kB 6 kB 3 kB", "broken 3 kB 0 B 3 kB DAMAGED", "remote 3 kB 0 B 0 B 3 kB 1 kB not in the cache"]
    about = [
        *("run, by group", "group size", "learner 1 kB"),
        *("run, by stage", "stage size", "adapt 2 kB"),
        *("run, by iteration", "iteration size", "0 to 9 4 kB"),
    ]
    assert lines_of(tables.disk_view(usage)) == [header, *rows, "together 3 kB", *about]
    assert lines_of(tables.disk_view(replace(usage, details=False)))[4:] == ["together 3 kB"]


class Stopped:
    """A run that wrote no more after some iterations; the metrics of each are its number."""

    def __init__(self, path, done, window):
        self.path, self.files, self.capacity = path, SimpleNamespace(remote=None), 10
        self.iterations = range(done)
        self.config = {"stop": StoppingConfig(samples=1, convergence_window=window).model_dump()}

    def __getitem__(self, i):
        return SimpleNamespace(metrics=lambda: i)


@pytest.mark.parametrize(("done", "window", "read"), [(5, None, [4]), (5, 3, [2, 3, 4]), (2, 3, [0, 1]), (10, 3, None)])
def test_a_run_is_complete_where_its_last_iterations_meet_its_end(done, window, read, tmp_path, monkeypatch):
    for met in (True, False):
        asked = []
        monkeypatch.setattr(
            StoppingConfig, "met", lambda self, history, asked=asked, met=met: asked.append(history) or met
        )
        is_complete = met or read is None
        assert run_info.state_of(Stopped(tmp_path, done, window), None) == ("complete" if is_complete else "stopped")
        assert asked == [read] * (read is not None)


@pytest.mark.parametrize(
    ("witness", "reproduced", "counts"),
    [(True, [1.0, 0.0, 1.0], {"replayed": 3, "reproduced": 2}), (False, [1.0], None), (True, [], None)],
)
def test_episodes_that_were_played_again_count_where_the_run_asks_for_them(witness, reproduced, counts):
    table = pa.table({REPRODUCED: reproduced})  # those of the parent of a fork, which may ask for none
    run = SimpleNamespace(config={"env": {"witness": witness}}, iterations=reproduced, metrics=lambda: table)
    assert run_info._witness(run) == counts


def test_sessions_are_told_with_what_changed_since_the_one_before():
    sessions = [
        SimpleNamespace(number=n, started=f"then {n}", environment={"code": "a"}, versions={"torch": version})
        for n, version in enumerate(("1.0", "1.0", "2.0"))
    ]
    (told,) = run_info.session_changes(SimpleNamespace(sessions=lambda: sessions))
    assert told == {"session": 2, "started": "then 2", "changed": {"versions.torch": ("1.0", "2.0")}}


def test_a_list_has_the_success_after_adaptation_in_the_last_iteration(complete, monkeypatch):
    rates = {1: {"step_0.success_rate": 0.25, "step_1.success_rate": 0.5}}
    monkeypatch.setattr(run_info, "iteration_metrics", lambda run, iteration: rates.get(iteration, {}))
    assert run_info.list_run_row(complete.path)["last_success_rate"] == 0.5


def test_an_output_has_the_axes_units_and_meanings_of_its_arrays(complete):
    arrays = run_info.output_info(complete, StageRef(1, "sample_tasks"))["arrays"]
    found = {array["name"]: array for array in arrays}
    params = found["params"]
    assert (params["dims"][0], params["shape"], params["dtype"]) == ("task", [4, 2], "float64")
    assert [len(array["dims"]) for array in arrays] == [len(array["shape"]) for array in arrays]
    spec = complete.files.spec("tasks/params")
    assert (params["unit"], params["description"]) == (
        spec.attributes.get("unit", ""),
        spec.attributes.get("description", ""),
    )
