"""The command as a user types it: exit codes, messages, what is on disk afterwards."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from rich.table import Table

import metaloom
from metaloom import storage
from metaloom.flows.cli import COMMANDS, GROUPS, run
from metaloom.flows.cli.output import PrintableLines, console, say
from metaloom.flows.cli.train import _train
from metaloom.flows.commands.train import Observer, TrainResult, resume
from metaloom.flows.operations import operations
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import best_iteration, runs_root
from metaloom.pipeline.envs import ENVS
from metaloom.storage.format.files import render, sealed
from metaloom.storage.read.verify import Damage

TINY = (
    "--set", "num_tasks=3", "--set", "episodes_per_task=2", "--set", "max_episode_steps=5",
    "--set", "policy.hidden_sizes=[8]", "--set", "algorithm.num_epochs=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def train(name: str, *options: str, iterations: int = 2) -> int:
    tokens = ["train", "promp-point-corner", "--run", name, "--workers", "0", "--set", f"iterations={iterations}"]
    return run([*tokens, *TINY, *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two iterations; not to be changed."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("METALOOM_RUNS", str(tmp_path_factory.mktemp("runs")))
        assert train("first") == 0
        return runs_root() / "first"


@pytest.fixture
def first(trained, runs) -> Path:
    """A copy of it, called first."""
    return Path(shutil.copytree(trained, runs / "first"))


def test_train_tells_where_the_run_lies_and_how_to_look_further(runs, capsys):
    assert train("first") == 0
    out = capsys.readouterr().out
    assert str(runs / "first") in out
    for command in ("view first", "show first", "replay first@0"):
        assert f"metaloom {command}" in out
    assert "tensorboard" not in out  # it was not asked to log there
    assert (runs / "reports" / "first" / "learning_curve.png").stat().st_size > 1000


def test_train_tells_how_to_look_further_at_a_run_whose_path_ends_in_no_name_for_runs(runs, capsys):
    assert train(str(runs / "nüll !"), iterations=1) == 0
    assert f"metaloom replay '{runs}/nüll !'@0" in capsys.readouterr().out


def test_what_would_steer_the_terminal_is_not_printed(capsys):
    assert run(["show", "./a\x1b[2Jb"]) == 2  # refused, and told as Python writes it
    console().print("a\x1b[2Jb", markup=False)
    console().print(Table("a\x1b[2Jb"))
    console().out("a\x1b[2Jb")
    say(True, "a\x1b[2Jb")
    record = logging.LogRecord("metaloom", logging.WARNING, "", 0, "%s", ("a\x1b[2Jb",), None)
    said = capsys.readouterr()
    texts = (*said.err.splitlines(), *said.out.splitlines(), PrintableLines().format(record))
    assert [text for text in texts if "\x1b" in text] == []
    assert sum("a\N{REPLACEMENT CHARACTER}[2Jb" in text for text in texts) == 5


def test_help_lists_every_command_in_its_group_on_one_line_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert metaloom.__doc__.splitlines()[0] in " ".join(out.split())
    for group in GROUPS:
        commands = [name for name, operation in operations().items() if operation.group == group]
        _, _, panel = out.partition(f"- {group} ---")
        lines = [line.strip("| ") for line in panel.splitlines()[1 : 1 + len(commands)]]
        for name, line in zip(commands, lines, strict=True):
            assert (line.split()[0], line.endswith(".")) == (name, True), line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text_with_an_example(name, capsys):
    assert run([name, "--help"]) == 0
    assert "Example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["train", "promp-point-cornr"], "did you mean promp-point-corner"),
        (["graph", "nope"], "'nope' is neither a recipe nor a stored run"),
        (["train", "promp-point-corner", "--run", "x", "--set", "algorithm.inner_rate=1"], "algorithm.inner_rate"),
        (["train", "promp-point-corner", "--run", "x", "--set", "iterations=0"], "iterations"),
        (["train", "promp-point-corner", "--run", "x", "--set", "env=point-corner-2"], "point-corner-2"),
        (["train", "promp-point-corner", "--run", "x", "--set", "env.options.reward=cheap"], "cheap"),
        (["train", "promp-point-corner", "--run", "con"], "con"),
        (["train", "promp-point-corner", "--run", "x", "--workers", "-1"], "workers"),
        (["train", "promp-point-corner", "--run", "x", "--threads", "2"], "--workers 0"),
        (["train", "settings.yaml"], "settings.yaml"),
        (["train", "promp-point-corner", "--speed", "9"], "--set NAME=VALUE` changes a setting"),
        (["train", "promp-point-corner", "--iteratons", "3"], "did you mean --iterations?"),
        (
            ["train", "promp-point-corner", "--seed", "0", "--set", "seed=2"],
            "--seed cannot be combined with --set seed",
        ),
        (["ls", "--sotr", "name"], "did you mean --sort?"),
        (["du", "--sotr"], "metaloom du does not accept --sotr"),
        (["resume", "nothing-here"], "nothing-here"),
        (["show", "nothing-here"], "nothing-here"),
        (["verify", "nothing-here"], "nothing-here"),
        (["replay", "nothing-here@1"], "nothing-here"),
        (["replay", "x@last"], "last"),
        (["replay", f"x@{'9' * 5000}"], "after the @"),
        (["report", "x@2"], "x@2: expected a run without an iteration; use x"),
        (["train", "promp-point-corner", "--run", "x", "--set", "iterations=true"], "expected an integer, got True"),
        (["train", "promp-point-corner", "--run", "x", "--workers", "2", "--scheduler", "tcp://x:1"], "one of them"),
        (
            ["train", "promp-point-corner", "--probe"],
            "--probe requires --dry-run; add --dry-run, or remove --probe",
        ),
        (["recipes", "--format", "json"], "--format requires a recipe; add a recipe, or remove --format"),
        (["recipes", "promp", "--schema"], "--schema cannot be combined with a recipe"),
        (["doctor", "--set", "env.options.reward=dense"], "--set requires --env"),
        (
            ["doctor", "--env", "point-corner", "--set", "iterations=3"],
            "cannot set iterations; only env settings are allowed",
        ),
        (["doctor", "--env", "point-corner", "--set", "env.speed=3"], "use env settings such as env.options.NAME"),
        (["sweep", "promp-point-corner", "--metric", "x"], "--metric requires --optuna"),
        (["sweep", "promp-point-corner", "--search", "algorithm.inner_lr=0.1..0.2"], "--search requires --optuna"),
    ],
)
def test_wrong_usage_exits_with_2_says_why_and_creates_nothing(tokens, found, runs, tmp_path, capsys):
    assert run(tokens) == 2
    streams = capsys.readouterr()
    assert found in streams.err
    assert "Traceback" not in streams.err
    assert streams.out == ""
    assert not runs.exists() or not list(runs.iterdir())
    assert list(tmp_path.iterdir()) in ([], [runs])


def test_a_run_without_a_log_says_so_and_one_without_such_lines_says_nothing(first, capsys):
    for words, said in ((["--level", "error"], ""), (["--json", "--level", "error"], "")):
        assert (run(["logs", "first", *words]), capsys.readouterr().out) == (0, said)
    (first / "_operator" / "log.jsonl").unlink()
    assert (run(["logs", "first", "--json"]), capsys.readouterr().out) == (0, "")
    assert run(["logs", "first"]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(
        f"no log of {first} here: the run was trained by an earlier"
    )


def test_a_run_that_is_not_there_suggests_one_that_is(first, capsys):
    for command in (["show", "frist"], ["evaluate", "frist@1"], ["verify", "Firts"]):
        assert run(command) == 2
        assert capsys.readouterr().err.endswith("; did you mean first?\n")
    assert run(["show", "nothing-like-it"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_wrong_environment_gets_a_suggestion_first_and_a_list_that_is_complete(capsys):
    assert run(["train", "promp", "--run", "x", "--set", "env=half-cheetah-dr"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[0] == "metaloom: env.name is 'half-cheetah-dr'; did you mean half-cheetah-dir?"
    assert len(error) < 400
    assert run(["recipes", "--envs"]) == 0
    assert {*ENVS} <= {*capsys.readouterr().out.split()}


def test_a_name_that_is_taken_is_refused_and_the_run_untouched(first, capsys):
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    assert train("first") == 2
    assert "first: there is a run; expected a path where nothing is stored yet" in capsys.readouterr().err
    assert before == {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}


def test_replay_exits_with_0_when_all_is_identical_and_prints_json(first, capsys):
    capsys.readouterr()
    assert run(["replay", "first@1", "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert [o["identical"] for o in outcomes] == [True] * 7


@pytest.mark.parametrize("name", ["latest", "-1", "best"])
def test_a_name_of_an_iteration_means_the_same_in_every_command(name, first, capsys):
    i = best_iteration(storage.open_run(first)) if name == "best" else 1
    updates = i if name == "best" else 2
    assert run(["show", f"first@{name}"]) == 0
    assert f"first, iteration {i}" in capsys.readouterr().out
    assert run(["replay", f"first@{name}", "--json"]) == 0
    assert {outcome["iteration"] for outcome in json.loads(capsys.readouterr().out)} == {i}
    assert run(["optimize", f"first@{name}", "--set", "algorithm.clip_eps=0.1"]) == 0
    assert f"iteration {i}, meta_optimize" in capsys.readouterr().out
    assert run(["evaluate", f"first@{name}", "--workers", "0", "--test-episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == updates
    assert run(["fork", f"first@{name}", "--run", "second"]) == 0
    assert f"{updates} iteration" in capsys.readouterr().out


def test_replay_prints_json_without_infinity_when_an_array_has_another_shape(first, monkeypatch, capsys):
    import metaloom.stages.sample_tasks as module

    right = module.draw_tasks
    monkeypatch.setattr(module, "draw_tasks", lambda *a, **options: right(*a, **{**options, "num_tasks": 9}))
    capsys.readouterr()
    assert run(["replay", "first@1", "--stage", "sample_tasks", "--json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (params,) = [difference for difference in outcome["differences"] if difference["array"] == "params"]
    assert (params["stage"], params["stored"], params["max_abs"]) == ("sample_tasks", "float64[3, 2]", None)


def test_replay_and_evaluate_take_a_scheduler_instead_of_workers(first, monkeypatch, capsys):
    import metaloom.flows.rollouts.connection

    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_ANSWER_SECONDS", 0.1)  # after which nobody is there
    for command in ("replay", "evaluate", "resume"):
        assert run([command, "first", "--scheduler", "tcp://127.0.0.1:1"]) == 1
        assert "metaloom: no Dask scheduler answers at tcp://127.0.0.1:1" in capsys.readouterr().err


def test_replay_exits_with_1_and_a_table_when_a_stage_differs(first, monkeypatch, capsys):
    import metaloom.stages.sample_tasks as module

    right = module.draw_tasks
    monkeypatch.setattr(module, "draw_tasks", lambda *a, **options: right(*a, **{**options, "iteration": 99}))
    capsys.readouterr()
    assert run(["replay", "first@1", "--stage", "sample_tasks"]) == 1
    out = capsys.readouterr().out
    assert "params" in out
    assert "ulp" in out


def test_verify_exits_with_1_and_names_what_is_damaged(first, capsys):
    capsys.readouterr()
    assert run(["verify", "first"]) == 0
    assert capsys.readouterr().out.endswith("first: every file is intact\n")
    (about,) = (first / "_sessions").glob("*.closed/session.json")
    begun = {**json.loads(about.read_bytes()), "sealed": False}  # as it is until the session ends
    about.write_bytes(render(sealed(begun)))
    assert run(["verify", "first"]) == 0
    assert "first: every file is intact\nThe last session to write" in capsys.readouterr().out
    chunk = next((first / "data.zarr" / "rollouts_0" / "rewards").glob("c.1.*"))
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    capsys.readouterr()
    assert run(["verify", "first"]) == 1
    out = capsys.readouterr().out
    for word in ("rewards", "collect_rollouts", "1", "--repair"):
        assert word in out


def test_what_does_not_belong_to_a_run_is_left_to_the_user(first, capsys):
    (first / "notes.txt").write_text("mine")
    (first / "_commits" / "notes").write_text("mine")
    capsys.readouterr()
    assert run(["verify", "first"]) == 1
    out = capsys.readouterr().out
    assert "remove or move files that do not belong to the run" in out
    assert "--repair" not in out
    assert run(["resume", "first", "--repair", "--workers", "0"]) == 1
    assert "remove or move files that do not belong to the run" in capsys.readouterr().out
    assert (first / "notes.txt").read_text() == (first / "_commits" / "notes").read_text() == "mine"


def test_resume_with_repair_computes_damaged_outputs_again(first, digests, capsys):
    before = digests(first)
    chunk = next((first / "data.zarr" / "samples_0" / "advantages").glob("c.0.*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert run(["verify", "first"]) == 1
    assert run(["resume", "first", "--repair", "--workers", "0"]) == 0
    assert run(["verify", "first"]) == 0
    assert digests(first) == before
    capsys.readouterr()


def test_a_longer_run_is_made_by_resuming_with_more_iterations(first, capsys):
    assert run(["resume", "first", "--iterations", "3", "--workers", "0"]) == 0
    capsys.readouterr()
    assert run(["ls", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["iterations_done"]) == ("first", 3)


def test_evaluate_prints_a_return_for_every_number_of_adaptation_steps(first, capsys):
    capsys.readouterr()
    tokens = ["evaluate", "first@1", "--num-tasks", "2", "--adaptation-steps", "2", "--workers", "0"]
    assert run([*tokens, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    rows = found["tasks"]
    assert [(row["adaptation_steps"], row["task"]) for row in rows] == [(k, b) for k in range(3) for b in range(2)]
    assert [row["adaptation_steps"] for row in found["adaptation"]] == [0, 1, 2]
    assert run(tokens) == 0
    assert "learner after 1 update, 2 tasks" in capsys.readouterr().out


def test_evaluate_takes_all_it_is_asked_for_from_the_command_line(first, tmp_path, capsys):
    tasks = tmp_path / "tasks.json"
    tasks.write_text("[[2, 2], [-2, 2], [2, -2]]")
    capsys.readouterr()
    tokens = ["--tasks", str(tasks), "--episodes", "3", "--test-episodes", "4", "--deterministic", "--seed", "3"]
    plot = tmp_path / "curve.png"
    options = ["--num-tasks", "2", "--evenly-by", "goal_x", "--plot", str(plot), "--workers", "0", "--json"]
    assert run(["evaluate", "first", *tokens, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = {"num_tasks": 2, "evenly_by": "goal_x", "episodes": 3, "test_episodes": 4, "deterministic": True, "seed": 3}
    assert asked.items() <= found["evaluation"].items()
    assert {row["goal_x"] for row in found["tasks"]} == {-2, 2}
    assert {row["num_episodes"] for row in found["tasks"]} == {4}
    assert found["adaptation"][1]["adaptation_episodes"] == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("plot", ["curve.jpg", "nowhere/curve.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_evaluating(plot, capsys):
    assert run(["evaluate", "nothing-here", "--plot", plot]) == 2
    assert "expected a .png, .svg or .pdf file" in capsys.readouterr().err


def test_settings_can_come_from_a_file(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("env: point-corner\nalgorithm: {name: promp, inner_steps: 2}\nnum_tasks: 2\nepisodes_per_task: 2\n")
    tokens = ["train", str(file), "--run", "mine", "--workers", "0", "--set", "iterations=1"]
    assert run([*tokens, "--set", "max_episode_steps=4"]) == 0
    capsys.readouterr()
    assert run(["show", "mine", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["algorithm"]["inner_steps"], config["max_episode_steps"]) == (2, 4)


def test_an_iteration_beyond_the_last_names_the_command_that_computes_it(first, capsys):
    for command in ("show", "replay"):
        assert run([command, "first@99"]) == 1
        err = capsys.readouterr().err
        assert err.startswith("metaloom: ")
        assert "first --iterations 100`" in err


def test_a_folder_that_cannot_hold_a_report_is_refused(first, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(["report", "first", "--out", str(tmp_path / "file")]) == 1
    assert "--out" in capsys.readouterr().err


def test_an_empty_runs_variable_means_the_default(monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", "")
    assert runs_root() == Path("runs")


@contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard output is a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    # Closing it writes what is left in its buffer, as Python does when it exits.
    with os.fdopen(writer, "w") as out, redirect_stdout(out):
        yield


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_training_goes_on_when_nobody_reads_its_output_any_more(options, runs, capsys):
    with nobody_reads():
        assert train("first", *options) == 0
    assert len(storage.open_run(runs / "first").iterations) == 2
    assert (runs / "reports" / "first" / "report.html").exists()
    assert "Error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "tokens", [["recipes"], ["recipes", "--schema"], ["ls", "--json"], ["ls"], ["--help"], ["train", "--help"]]
)
def test_a_command_whose_output_nobody_reads_ends_as_if_by_sigpipe(tokens, capsys):
    with nobody_reads():
        assert run(tokens) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_watching_ends_when_nobody_reads_it_any_more(options, first, capsys):
    capsys.readouterr()
    with nobody_reads():
        assert run(["watch", str(first), *options]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_leaves_a_run_that_can_be_resumed(runs, interrupts, capsys):
    command = [sys.executable, "-m", "metaloom.flows.cli", "train", "promp-point-corner", "--run", "stopped"]
    command += ["--workers", "0", "--set", "iterations=500", *TINY]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert trainer.stdout is not None
        assert "iteration 0 (1 of" in trainer.stdout.readline()
        for _ in range(interrupts):
            trainer.send_signal(signal.SIGINT)
            time.sleep(0.001)
        out, err = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
    assert trainer.returncode == 130
    assert "finishing the current stage" in err
    if interrupts == 1:
        assert "continue with: metaloom resume" in out
    stored = storage.open_run(runs / "stopped")
    done = len(stored.iterations)
    assert done < 500
    assert run(["verify", "stopped"]) == 0
    assert run(["replay", f"stopped@{max(done - 1, 0)}"]) == 0
    assert _resume_for_one_iteration(runs / "stopped") == done + 1
    capsys.readouterr()


def _resume_for_one_iteration(folder: Path) -> int:
    done: list[int] = []
    observer = Observer(iteration_done=lambda report: done.append(report.iteration + 1), should_stop=lambda: bool(done))
    resume(folder, backend=Backend(workers=0), observer=observer)
    return done[-1]


def test_ctrl_c_ends_a_command_with_130_and_blames_nobody(runs, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("metaloom.flows.operations.ls.find_runs", interrupted)
    assert run(["ls"]) == 130
    assert capsys.readouterr().err == "metaloom: interrupted\n"


PRINTING = """
import logging, os, sys
from metaloom.flows import cli
from metaloom.flows.cli.output import print_json

def run(tokens):
    print("a plug-in prints")
    os.write(1, b"its library prints\\n")
    logging.getLogger("its").warning("it \\x1b[2Jwarns")
    sys.stdout = None
    print_json([1])
    return 0

cli.run = run
sys.argv = ["metaloom", "ls", "--json"]
cli.main()
"""


def test_with_json_only_the_result_is_on_standard_output_whatever_a_plug_in_prints():
    ended = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [1]
    assert {*ended.stderr.splitlines()} == {
        "a plug-in prints",
        "its library prints",
        "it \N{REPLACEMENT CHARACTER}[2Jwarns",
    }


LINKED = Damage("run.json", None, None, None, None, "a symbolic link, not a file")


@pytest.mark.parametrize(
    ("result", "message", "code"),
    [
        ({"stopped": True}, "stopped after 3 iterations; continue with: metaloom resume ./there\n", 130),
        ({"enough": ("a", "b")}, "\nended after 3 iterations, as `stop` requires: a; b\nNEXT\n", 0),
        (
            {"computed": 0},
            "nothing to do: the run already has its 3 iterations; for more: metaloom resume ./there --iterations N\n"
            "NEXT\n",
            0,
        ),
        ({"computed": 7}, "NEXT\n", 0),
        ({"repaired": ("x",), "damage": ()}, "repaired  x\nverified  every file is intact\nNEXT\n", 0),
        ({"damage": [LINKED]}, f"damaged   {LINKED}\na run must not contain links; copy the files", 1),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_train_prints_why_it_ended_and_the_next_steps(result, message, code, as_json, monkeypatch, capsys):
    monkeypatch.setattr("metaloom.flows.cli.train._next_steps", lambda folder: "NEXT")
    start = lambda observer: TrainResult(Path("there"), 3, **{"stopped": False, **result})  # noqa: E731
    assert _train((), as_json, Path("there"), start) == code
    out, err = capsys.readouterr()
    assert (err if as_json else out).startswith(message)
    assert (out if as_json else err) == ""
    if not code:
        assert _train(("tensorboard",), as_json, Path("there"), start) == 0
        assert (
            f"NEXT\n  tensorboard --logdir {storage.location(Path('logs/tensorboard'))}\n"
            in capsys.readouterr()[as_json]
        )
