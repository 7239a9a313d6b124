"""Sweeps: what is refused before anything starts, what is trained once and no more, and what kills and Ctrl-C leave."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from small_runs import SMALL_SWEEP

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.sweep import train_sweep
from metaloom.flows.errors import UsageError
from metaloom.flows.results.sweep import SweepObserver
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.plan import check_unchanged, plan
from metaloom.flows.sweeps.space import Search
from metaloom.flows.sweeps.stored import find_sweep, held
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.schema import ConfigError

SERIAL = Backend(workers=0)
GRID = {"algorithm.inner_lr": ("0.05", "0.1")}


@pytest.fixture(autouse=True)
def runs_folder(tmp_path, monkeypatch, pytestconfig) -> Path:
    """A runs folder of the test; processes that are started import this file by its name, from the project's root."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(pytestconfig.rootpath)])
    return tmp_path / "runs"


def planned(name="lr", *, seeds=2, grid=GRID, settings=()):
    return plan("promp-point-corner", name, seeds=seeds, grid=grid, settings=(*SMALL_SWEEP, *settings))


def trained(sweep, configs, **options):
    return train_sweep(sweep, configs, backend=SERIAL, **options)


def all_digests(root, digests):
    return {folder.name: digests(folder) for folder in storage.find_runs(root)}


def words(*more):
    sets = [word for setting in SMALL_SWEEP for word in ("--set", setting)]
    return ["sweep", "promp-point-corner", *sets, "--workers", "0", *more]


def test_a_sweep_trains_every_seed_of_every_setting_as_a_run_named_by_them(runs_folder, capsys):
    assert cli.run(words("--name", "lr", "--seeds", "2", "--grid", "algorithm.inner_lr=0.05,0.1")) == 0
    names = [f"lr-inner_lr-{value}-seed-{seed}" for value in (0.05, 0.1) for seed in (1, 2)]
    runs = {run.name: run for run in metaloom.open_runs("lr-*")}
    assert sorted(runs) == names
    told = capsys.readouterr().out
    for name in names:
        assert len(runs[name].iterations) == 2
        before, after = (runs[name][-1].metrics()[f"step_{k}.average_return"] for k in (0, 1))
        assert f"{name}  complete  return before {before:.2f}  after {after:.2f}  " in told
    assert told.startswith("sweep lr: 4 runs, 0 complete\n")
    assert "4 runs: 4 complete" in told
    assert told.endswith("compare them: metaloom compare lr\n")
    config = runs["lr-inner_lr-0.1-seed-2"].config
    assert (config["algorithm"]["inner_lr"], config["seed"]) == (0.1, 2)
    assert cli.run(["ls", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == {*names}


def test_the_same_command_goes_on_and_trains_nothing_again(runs_folder, capsys):
    sweep, configs = planned()
    seen = []
    first = SweepObserver(ended=seen.append, should_stop=lambda: len(seen) >= 1)
    result = trained(sweep, configs, observer=first)
    assert (result.stopped, [outcome.ending for outcome in result.outcomes]) == (True, ["complete"])
    assert cli.run(["sweep", "lr", "--status", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows] == ["complete", "waiting", "waiting", "waiting"]
    begun = []
    result = trained(sweep, configs, observer=SweepObserver(begun=begun.append))
    assert [run.name for run in begun] == [run.name for run in sweep.runs[1:]]
    assert not result.stopped
    # By its name alone.
    assert cli.run(["sweep", "lr", "--workers", "0"]) == 0
    assert "begins" not in capsys.readouterr().out


def test_asked_to_stop_it_finishes_the_stage_and_goes_on_there_with_equal_bits(runs_folder, tmp_path, digests):
    sweep, configs = planned(seeds=1)
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) > 5

    result = trained(sweep, configs, observer=SweepObserver(should_stop=should_stop))
    assert (result.stopped, result.outcomes[0].ending) == (True, "stopped")
    assert 0 < len(storage.open_run(sweep.folder(sweep.runs[0])).refs()) < 16
    trained(sweep, configs)
    stopped = all_digests(runs_folder, digests)
    whole = replace(sweep, root=tmp_path / "whole")
    trained(whole, configs)
    assert stopped == all_digests(tmp_path / "whole", digests)


def sweep_in_this_process(parallel, root):
    os.environ["METALOOM_RUNS"] = root  # processes are forked from one that has another test's
    sweep, configs = planned()
    train_sweep(sweep, configs, parallel=parallel, backend=SERIAL)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_sweep_killed_in_the_middle_and_gone_on_with_has_the_digests_of_an_unkilled_one(
    parallel, runs_folder, tmp_path, digests
):
    sweep, configs = planned()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metaloom.flows.commands.train"])
    process = context.Process(target=sweep_in_this_process, args=(parallel, str(runs_folder)))
    process.start()
    deadline = time.monotonic() + 60
    while len(storage.find_runs(runs_folder)) < 2:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    trainings = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    # Processes of runs end with the one that started them, which is not to say before it.
    assert psutil.wait_procs(trainings, timeout=120)[1] == []
    done = [run for run in sweep.runs if storage.run_exists(sweep.folder(run))]
    assert 2 <= len(done) <= 4
    result = trained(sweep, configs)
    assert result.failed == ()
    killed = all_digests(runs_folder, digests)
    trained(replace(sweep, root=tmp_path / "whole"), configs)
    assert killed == all_digests(tmp_path / "whole", digests)
    assert len(killed) == 4


@pytest.mark.slow
@pytest.mark.no_cover
def test_ctrl_c_stops_runs_in_several_processes_in_order(runs_folder):
    code = (
        f"import sys; from metaloom.flows import cli; sys.exit(cli.run({words('--name', 'lr', '--parallel', '2')!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, (said, rest, errors)
    assert "finishing the current stage" in errors
    assert "continue with the same command, or: metaloom sweep lr" in rest
    assert find_sweep("lr") is not None
    assert all(storage.current_writer(folder) is None for folder in storage.find_runs(runs_folder))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.sweep) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_signals_to_all_processes_of_a_sweep_lose_no_run_in_its_first_moments(number, runs_folder):
    code = (
        "import signal, sys; from metaloom.flows import cli; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        f"sys.exit(cli.run({words('--name', 'lr', '--seeds', '2', '--parallel', '2')!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # The server of processes, and with it their processes before they have begun.
    while not (others := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None
    while process.poll() is None and len(others) < 4:  # with the tracker of semaphores
        for other in others:
            with suppress(psutil.NoSuchProcess):
                other.send_signal(number)
        others = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "failed" not in said
    assert "exit code" not in said


def test_a_hangup_does_not_end_the_tracker_without_which_no_lock_can_be_made():
    code = """
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from metaloom.flows.signals import kept_from_children

with kept_from_children(signal.SIGHUP, signal.SIGINT):
    within = signal.pthread_sigmask(signal.SIG_BLOCK, [])
after = signal.pthread_sigmask(signal.SIG_BLOCK, [])
tracker = Path(f"/proc/{resource_tracker._resource_tracker._pid}/status").read_text()
blocked = int(tracker.partition("SigBlk:")[2].split()[0], 16)
print(sorted(map(int, within)), sorted(after), bool(blocked & 1 << signal.SIGHUP - 1))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{[1, 2]} [] True\n"


def test_a_changed_grid_is_told_and_refused_but_more_of_it_can_be_added(runs_folder, capsys):
    trained(*planned(seeds=1))
    with pytest.raises(
        UsageError, match=r"grid: algorithm.inner_lr=0.05,0.1 before, .*=0.2 now\. Use --name to start another"
    ):
        trained(*planned(seeds=1, grid={"algorithm.inner_lr": ("0.2",)}))
    settings = re.escape(" ".join(SMALL_SWEEP))
    with pytest.raises(
        UsageError, match=f"settings: {settings} before, {settings} algorithm.clip_eps=0.1 now. Use --name"
    ):
        trained(*planned(seeds=1, settings=("algorithm.clip_eps=0.1",)))
    more = {"algorithm.inner_lr": ("0.05", "0.1", "0.2")}
    with pytest.raises(UsageError, match=r"--extend .* adds the 4 new runs"):
        trained(*planned(seeds=2, grid=more))
    assert len(find_sweep("lr").runs) == 2
    result = trained(*planned(seeds=2, grid=more), extend=True)
    assert len(result.outcomes) == 4
    assert len(find_sweep("lr").runs) == len(storage.find_runs(runs_folder)) == 6


def test_a_grid_does_not_become_a_search_nor_a_search_a_grid():
    grid, _ = planned(seeds=1)
    search = replace(grid, grid={}, runs=(), search=Search(2, "return", {"algorithm.inner_lr": "0.05,0.1"}))
    with pytest.raises(UsageError, match=r"the sweep lr is stored as a grid, not a search\. --name starts another"):
        check_unchanged(grid, search, extend=True)
    with pytest.raises(UsageError, match=r"the sweep lr is stored as a search, not a grid\. --name starts another"):
        check_unchanged(search, grid, extend=True)


def test_a_sweep_is_not_named_as_a_run_is_and_not_stored_under_a_url(runs_folder, monkeypatch):
    (runs_folder / "lr").mkdir(parents=True)
    (runs_folder / "lr" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"lr is the name of a run in .*; choose another with --name NAME"):
        planned()
    monkeypatch.setenv("METALOOM_RUNS", "s3://bucket/runs")
    with pytest.raises(UsageError, match="the runs folder is s3://bucket/runs, but sweeps need a folder"):
        planned()


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ({"algorithm.iner_lr": ("0.1",)}, r"--grid algorithm.iner_lr=0.1: algorithm.iner_lr: .*did you mean inner_lr"),
        ({"algorithm.inner_lr": ("0.1", "-1")}, r"--grid algorithm.inner_lr=-1: algorithm.inner_lr: .*got -1"),
        ({"algorithm.inner_lr": ("0.1", "much")}, r"got 'much'"),
        ({"algorithm.inner_lr": ("0.1", "0.10")}, r"inner_lr=0.1 and algorithm.inner_lr=0.10 .* the same settings"),
        ({"seed": ("1", "2")}, "use --seeds"),
        ({"num_tasks": ("2", "3")}, "num_tasks is set by both --grid and --set"),
        ({"algorithm.inner_lr": ()}, "has no values"),
        ({"algorithm.inner_lr": tuple(f"0.{n:04}" for n in range(1, 502))}, r"1,002 runs; .*--yes"),
        ({"env.options.reward": ("dense", "dens")}, "is set by both --grid and --set"),
        ({"algorithm.optimizer": ("adam", "adamm")}, "adamm"),
    ],
)
def test_a_bad_grid_is_refused_before_anything_starts(grid, problem, runs_folder):
    with pytest.raises((UsageError, ConfigError), match=problem):
        trained(*planned(grid=grid))
    assert not (runs_folder / "sweeps").exists() or not [*(runs_folder / "sweeps").glob("*.json")]
    assert storage.find_runs(runs_folder) == []


def test_what_only_building_a_run_shows_is_refused_before_the_first_one_trains(runs_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "metaloom.flows.rollouts.dask", None)  # which needs no workers
    settings = [setting for setting in SMALL_SWEEP if not setting.startswith("env.")]
    grid = {"env.options.reward": ("dense", "no")}
    sweep, configs = plan("promp-point-corner", "r", seeds=1, grid=grid, settings=settings)
    with pytest.raises(EnvError, match="reward"):
        trained(sweep, configs)
    assert storage.find_runs(runs_folder) == []
    assert find_sweep("r") is None


@pytest.mark.parametrize("seeds", [0, (), (1, 1), (-1,), (1.5,), 10**6 + 1])
def test_bad_seeds_are_refused(seeds):
    with pytest.raises(UsageError, match="seed"):
        planned(seeds=seeds)
    with pytest.raises(UsageError, match=r"--grid algorithm\.inner_lr has no values"):
        plan("promp-point-corner", "r", grid={"algorithm.inner_lr": ()})
    assert [run.seed for run in planned(seeds=(7, 3))[0].runs] == [7, 3, 7, 3]
    assert planned(seeds=np.int64(2))[0] == planned(seeds=np.array([1, 2]))[0] == planned(seeds=2)[0]
    assert plan("promp-point-corner", "r")[0].seeds == (1, 2, 3, 4, 5)


def test_the_command_refuses_what_it_cannot_read(capsys):
    for more, problem in (
        (["--seeds", "x"], "--seeds x: expected"),
        (["--grid", "algorithm.inner_lr"], "expected KEY=V1,V2"),
        (["--parallel", "0"], "Must be >= 1"),
        (["--name", "a/b"], "run name"),
        (["--name", "a" * 61], "61 characters"),
        (["--status"], "--set cannot be combined with --status"),
    ):
        assert cli.run(words(*more)) == 2, more
        assert problem in capsys.readouterr().err
    assert cli.run(words("and", "more")) == 2
    assert "metaloom sweep does not accept and more" in capsys.readouterr().err
    assert cli.run(["sweep", "nothing", "--status"]) == 2
    assert "there is no sweep 'nothing'" in capsys.readouterr().err


def test_names_that_settings_do_not_give_are_made_of_digests():
    orders = ("{reward: dense, success_radius: 0.3}", "{success_radius: 0.3, reward: dense}")
    for equal in ({"policy.hidden_sizes": ("[8]", "[ 8]", "[8, 8]")}, {"env.options": orders}):
        with pytest.raises(UsageError, match="the same settings"):
            plan("promp-point-corner", "n", seeds=1, grid=equal)
    sweep, _ = plan("promp-point-corner", "n", seeds=1, grid={"policy.hidden_sizes": ("[8]", "[8,8]")})
    assert [run.name for run in sweep.runs] == ["n-hidden_sizes-8-seed-1", "n-hidden_sizes-8_8-seed-1"]
    sweep, _ = plan("promp-point-corner", "n", seeds=1, grid={"env.options": ("{reward: dense}",)})
    assert sweep.runs[0].name == "n-options-reward_dense-seed-1"
    for zeros in (19, 20):  # a run's name has at most 100 characters
        text = f"0.1{'0' * zeros}1"
        (run,) = plan("promp-point-corner", "n" * 60, seeds=1, grid={"algorithm.inner_lr": (text,)})[0].runs
        told = f"inner_lr-{text}" if zeros == 19 else run.digest[:12]
        assert run.name == f"{'n' * 60}-{told}-seed-1"


def test_a_sweep_of_somebody_else_imports_nothing_that_its_file_names(runs_folder, tmp_path, monkeypatch, capsys):
    evil = tmp_path / "evil_module.py"
    evil.write_text(f"open({str(tmp_path / 'CALLED')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(words("--seeds", "1", "--name", "theirs")) == 0
    file = runs_folder / "sweeps" / "theirs.json"
    document = json.loads(file.read_text())
    assert cli.run(["sweep", "theirs"]) == 0
    file.write_text(json.dumps(document | {"recipe": "gone.yaml"}))
    assert cli.run(["sweep", "theirs"]) == 2
    assert "gone.yaml" in capsys.readouterr().err
    escaped = tmp_path / "escaped.json"
    escaped.write_text('{"env": {"name": "evil_module\\u003aEvil"}}')
    for key, value in (
        ("settings", ["env=evil_module:Evil"]),
        ("settings", ['env="evil_module\\x3aEvil"']),
        ("grid", {"metrics": ["[evil_module:measure]"]}),
        ("grid", {'env.name="evil_module\\x3aEvil" #': ["x"]}),
        ("recipe", str(escaped)),
    ):
        file.write_text(json.dumps(document | {key: value}))
        capsys.readouterr()
        assert cli.run(["sweep", "theirs"]) == 2
        assert "its settings name evil_module:" in capsys.readouterr().err
        assert cli.run(["sweep", "theirs", "--status"]) == 0
    names = [f"evil_module:{name}" for name in "abcdef"]
    file.write_text(json.dumps(document | {"settings": [f"metrics=[{','.join(reversed(names))}]"]}))
    capsys.readouterr()
    assert cli.run(["sweep", "theirs"]) == 2
    assert f"its settings name {', '.join(names)}. Importing runs code" in capsys.readouterr().err
    # A sweep that this user wrote stays trusted if another program sorts the keys of its file.
    file.write_text(json.dumps(document | {"grid": {"metrics": ["[evil_module:measure]"], "iterations": ["1"]}}))
    find_sweep("theirs").write()
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    find_sweep("theirs").require_trust()
    assert not (tmp_path / "CALLED").exists()


def test_a_run_of_other_settings_under_a_name_of_the_sweep_is_not_touched(runs_folder, digests):
    sweep, configs = planned(seeds=1)
    other = runs_folder / sweep.runs[1].name
    metaloom.train(configs[0], other, progress=False)
    before = digests(other)
    with pytest.raises(UsageError, match="the run's settings differ"):
        trained(sweep, configs)
    assert digests(other) == before
    assert len(storage.find_runs(runs_folder)) == 1


def test_only_one_process_works_on_a_sweep():
    sweep, configs = planned(seeds=1)
    with held(sweep), pytest.raises(UsageError, match="another process"):
        trained(sweep, configs)
    trained(sweep, configs)  # the hold went with the context


def test_a_run_that_fails_is_told_and_the_others_are_trained(runs_folder, capsys, monkeypatch):
    sweep, configs = planned(seeds=1, grid={"algorithm.inner_lr": ("0.1", "1e30", "0.2")})
    ends = [outcome.ending for outcome in trained(sweep, configs).outcomes]
    assert ends == ["complete", "failed", "complete"]
    assert cli.run(["sweep", "lr", "--workers", "0"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("sweep lr: 3 runs, 2 complete\n")
    assert "failed  lr-inner_lr-1e30-seed-1" in told
    assert told.endswith("\nto try again: metaloom sweep lr\n")
    message = r"^sweep lr: 1 run failed\. lr-inner_lr-1e30-seed-1: .*finite.*\. Repeat it to try again$"
    with pytest.raises(UsageError, match=message):
        metaloom.sweep("lr", progress=False)


def test_a_file_that_is_no_sweep_is_refused_and_leads_nowhere(runs_folder):
    sweep, configs = planned(seeds=1)
    trained(sweep, configs)
    document = json.loads(sweep.file.read_text())
    (run,) = document["runs"][:1]
    wrong = [{"runs": [run | changed]} for changed in ({"name": "../elsewhere"}, {"settings": 5}, {"seed": True})]
    wrong += [{"runs": [run, run]}, {"seeds": [float("inf")]}]
    for text in ("{", "[]", "[" * 100_000, '{"format": "other"}', *(json.dumps(document | part) for part in wrong)):
        sweep.file.write_text(text)
        with pytest.raises((UsageError, storage.InvalidRunName)):
            find_sweep("lr")


@pytest.mark.parametrize("kind", ["pipe", "device", "file elsewhere", "folder", "huge", "recipe"])
def test_what_is_no_regular_file_in_place_of_a_sweep_is_refused_and_not_read(kind, runs_folder, tmp_path, capsys):
    sweep, _ = planned(seeds=1)
    sweep.write()
    file = sweep.file
    if kind == "recipe":
        os.mkfifo(tmp_path / "pipe.yaml")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"recipe": str(tmp_path / "pipe.yaml")}))
        assert cli.run(["sweep", "lr"]) == 2
        assert "pipe.yaml is a pipe or a device" in capsys.readouterr().err
        return
    os.rename(file, tmp_path / "moved.json")
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "huge":
            with file.open("wb") as sparse:
                sparse.truncate(2**26 + 1)
        case _:
            file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "moved.json")
    for words in (["sweep", "lr", "--status"], ["compare", "lr"], ["sweep", "lr"]):
        assert cli.run(words) == 2
        assert "sweeps/lr.json is not a sweep in the format metaloom-sweep/1 (" in capsys.readouterr().err


def test_a_recipe_that_changed_since_is_told(runs_folder, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("env: point-corner\nalgorithm: promp\n")
    plan(str(file), "mine", seeds=1, settings=SMALL_SWEEP)[0].write()
    assert len(find_sweep("mine").config(find_sweep("mine").runs[0]).policy.hidden_sizes) == 1
    file.write_text("env: point-corner\nalgorithm: {name: promp, clip_eps: 0.1}\n")
    with pytest.raises(UsageError, match=f"different arguments. {re.escape(str(file))} has changed. Use --name"):
        check_unchanged(find_sweep("mine"), plan(str(file), "mine", seeds=1, settings=SMALL_SWEEP)[0], extend=True)
    assert cli.run(["sweep", "mine"]) == 2
    assert "has changed since" in capsys.readouterr().err


def test_the_python_api_sweeps_and_gives_the_runs(runs_folder):
    settings = {"num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4, "iterations": 1}
    options = {"policy": {"hidden_sizes": [4]}, "progress": False, **settings}
    runs = metaloom.sweep("promp-point-corner", "mine", seeds=[4], grid={"algorithm.inner_lr": [0.05, 0.1]}, **options)
    assert [run.config["algorithm"]["inner_lr"] for run in runs] == [0.05, 0.1]
    assert {*runs.metrics()["run"].to_pylist()} == {"mine-inner_lr-0.05-seed-4", "mine-inner_lr-0.1-seed-4"}


def test_a_dry_run_creates_nothing(runs_folder, capsys):
    for seeds, count in ((("--seeds", "3"), 3), ((), 5)):
        assert cli.run(words(*seeds, "--dry-run")) == 0
        assert f"{count} runs: {count} waiting" in capsys.readouterr().out
    assert not runs_folder.exists()
