"""An environment that does its worst to its process: the run stops with an error that says where, and loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from distributed import Client, Security

import metaloom.flows.rollouts.connection
import metaloom.flows.rollouts.dask
from metaloom import storage
from metaloom.flows.cli import run
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.dask import DaskWorkers
from metaloom.flows.rollouts.guard import MARK, _Trainer
from metaloom.flows.rollouts.workers import Backend, SamplerSpec
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.seeding import seed_for
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.stages.rollouts.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("warm")
STEP_TIMEOUT = 1.0
HERE = Backend(workers=0)


@pytest.fixture(autouse=True)
def hostile_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parents[1] / "hostile")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    _, alive = psutil.wait_procs(workers(), timeout=120)
    assert alive == [], "worker processes outlive their run"
    assert list(temporary.glob("metaloom-*")) == [], "recordings outlive their run"


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "spawn_main" in " ".join(process.cmdline())]


@pytest.fixture
def hostile(tiny_config, tmp_path):
    """A run of an environment that turns hostile once the file `now` exists."""

    def build(fault: str, **options):
        options = {"fault": fault, "only_if": str(tmp_path / "now"), **options}
        env = {"name": "hostile_envs:Hostile", "options": options}
        return tiny_config(env=env, num_tasks=2, episodes_per_task=2, max_episode_steps=5)

    return build


# fault -> retries, words of the error
DEATHS = {
    "exit": (1, "its process died N times at the same point without a message, with exit status 3"),
    "alarm": (0, "its process died without a message, by SIGALRM"),
    "become_a_daemon": (0, "its process died without a message, with exit status 0"),
    "stop_itself": (3, "its process was stopped (SIGSTOP"),
    "raise_keyboard_interrupt": (3, "step raised KeyboardInterrupt"),
    "fork_and_hang": (3, "did not return within 1 s"),
    "ignore_signals": (3, "did not return within 1 s"),
    "segfault": (0, "its process died: Fatal Python error: Segmentation fault"),
    "abort": (0, "its process died: Fatal Python error: Aborted"),
    "hang_asleep": (3, "did not return within 1 s"),
    "hang_busy": (3, "did not return within 1 s"),
    "hang_with_the_gil": (3, "did not return within 1 s"),
}


# An abort is found as a segmentation fault is; who holds the GIL is harder to end than who sleeps or is busy.
EVERY_TIME = ("exit", "segfault", "hang_with_the_gil", "stop_itself")


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [pytest.param(*d, id=d[0], marks=() if d[0] in EVERY_TIME else pytest.mark.sweep) for d in DEATHS.items()],
)
def test_an_environment_that_ends_or_hangs_its_process_stops_the_run_with_its_place_and_loses_nothing(
    fault, expected, hostile, tmp_path, digests, record_property
):
    retries, words = expected
    config = hostile(fault)
    train(config, tmp_path / "run", backend=HERE)
    stored = digests(tmp_path / "run")
    (tmp_path / "now").touch()
    backend = Backend(workers=1, step_timeout_seconds=STEP_TIMEOUT, retries=retries)
    began = time.perf_counter()
    with pytest.raises(RolloutError) as caught:
        resume(tmp_path / "run", iterations=4, backend=backend)
    record_property("seconds", time.perf_counter() - began)
    error = caught.value
    # At least as often as it is tried; once more where a shard was blamed for what the other one did before.
    assert words in re.sub(r"died [2-4] times", "died N times", str(error))
    # Both tasks' shards do it, and either may be the first.
    assert re.search(r"iteration 3, collect_rollouts k=0: hostile_envs:Hostile, task [01] \(gain=", str(error))
    assert f"episode 0 (reset seed {error.about['seed']}), step 2: " in str(error)
    # One that ignores all signals says nothing at the one that asks it where it is.
    told = words.startswith(("did not return", "its process died: Fatal")) and fault != "ignore_signals"
    if told or fault == "raise_keyboard_interrupt":
        assert f"in do_{fault}" in error.about["traceback"]
    assert json.loads(json.dumps(error.about)) == error.about

    (tmp_path / "now").unlink()
    assert stored.items() <= digests(tmp_path / "run").items()
    assert storage.verify_run(tmp_path / "run") == []
    resume(tmp_path / "run", iterations=4, backend=HERE)
    actions = storage.open_run(tmp_path / "run")[3].rollouts(0).actions
    assert np.array_equal(error.arrays["actions"], actions[error.about["task"], 0, :3])


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("close_sockets", "its process died: The environment closed file descriptors"),
        pytest.param(
            "close_descriptors", "its process died: The environment closed file descriptors", marks=pytest.mark.sweep
        ),
        pytest.param("close_sockets_and_hang", "did not return within 1 s", marks=pytest.mark.sweep),
        pytest.param("shut_sockets_down", "its process died: The worker lost its connection", marks=pytest.mark.sweep),
    ],
)
def test_an_environment_that_closes_what_its_worker_hears_by_is_named_though_the_worker_has_left(
    fault, words, hostile, tmp_path
):
    (tmp_path / "now").touch()
    # A closed descriptor and a call that hangs are found out by one attempt; a lost connection may have other causes.
    retries = 0 if fault == "shut_sockets_down" else 3
    backend = Backend(workers=1, step_timeout_seconds=STEP_TIMEOUT if "hang" in fault else 30.0, retries=retries)
    with pytest.raises(RolloutError, match=rf"hostile_envs:Hostile, task [01] .*, step \d: {words}"):
        train(hostile(fault), tmp_path / "run", backend=backend)


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["fork", *(pytest.param(f, marks=pytest.mark.sweep) for f in ("fork_asleep", "daemonise", "endless_threads"))],
)
def test_what_an_environment_leaves_running_changes_no_digest_and_ends_with_the_run(
    fault, hostile, tmp_path, digests, capfd
):
    train(hostile("none"), tmp_path / "whole", backend=HERE)
    (tmp_path / "now").touch()
    train(hostile(fault), tmp_path / "run", backend=Backend(workers=1))
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    environments = {process: environment_of(process) for process in psutil.process_iter()}
    ours = [p for p, found in environments.items() if found.get("TMPDIR") == str(tmp_path / "temporary")]
    assert [process for process in ours if MARK in environments[process]] == []
    assert capfd.readouterr().err.count("forked its process (os.fork)") == (fault == "fork")


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


@pytest.mark.dask
@pytest.mark.slow
def test_an_environment_that_kills_the_trainer_is_named_and_nothing_is_left_of_it(hostile, tmp_path, digests):
    config = hostile("kill_its_parent")
    train(config, tmp_path / "run", backend=HERE)
    stored = digests(tmp_path / "run")
    (tmp_path / "now").touch()
    program = (
        "import sys; from pathlib import Path; from metaloom.flows.commands.train import resume; "
        "from metaloom.flows.rollouts.workers import Backend; "
        "resume(Path(sys.argv[1]), iterations=4, backend=Backend(workers=1, step_timeout_seconds=5.0))"
    )
    # It returns when nobody holds its standard error any more.
    done = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__': {program}", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    place = "hostile_envs:Hostile, iteration 3, inner step 0: task 0, episode 0, step 2"
    assert f"the trainer's process was killed. Environments that were being called then:\n  {place}\n" in done.stderr
    assert stored.items() <= digests(tmp_path / "run").items()
    (tmp_path / "now").unlink()
    resume(tmp_path / "run", iterations=4, backend=HERE)


@pytest.mark.dask
@pytest.mark.slow
def test_nobody_else_can_use_the_workers_of_a_run(hostile):
    config = hostile("none")
    with DaskWorkers.started(SamplerSpec.of(config, 1), Backend(workers=1).for_tasks(2)) as ours:
        client = ours.connection.client
        addresses = [client.scheduler_info()["address"], *client.scheduler_info()["workers"]]
        assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
        for address in addresses:
            attacker = Security.temporary()
            attacker.tls_ca_file = client.security.tls_ca_file  # anybody who connects is shown it
            for protocol, security in (("tcp", Security()), ("tls", attacker)):
                with pytest.raises(OSError, match=r"Timed out|closed|SSL|reset|certificate"):
                    Client(f"{protocol}://{address[6:]}", security=security, timeout=1)
        assert client.submit(os.getpid).result() in {worker.pid for worker in workers()}


@pytest.mark.dask
@pytest.mark.slow
def test_a_process_that_dies_among_blocks_of_choices_names_the_episode(tmp_path):
    def config(fault):
        env = {"name": "hostile_envs:Choices", "options": {"fault": fault}, "seed_bits": 64}
        settings = {"env": env, "algorithm": {"name": "a2c"}, "iterations": 1, "num_tasks": 2, "episodes_per_task": 30}
        return build_config({**settings, "max_episode_steps": 20, "min_steps": 60})

    train(config("none"), tmp_path / "good", backend=HERE)
    good = storage.open_run(tmp_path / "good")[0].rollouts(0)
    b, e = np.argwhere(good.observations[:, :, 0, 1] > 0.9)[0]
    assert (b, e) > (0, 2), "expected a first faulty episode after the first block"
    with pytest.raises(RolloutError) as caught:
        train(config("exit"), tmp_path / "run", backend=Backend(workers=1, retries=0))
    about, arrays = caught.value.about, caught.value.arrays
    assert [about[name] for name in ("task", "episode", "env_step")] == [b, e, 2]
    assert about["seed"] == seed_for(1, "resets", 0, 0, b, e)
    assert np.array_equal(arrays["actions"][:, 0], good.actions[b, e, :3])


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_that_dies_once_is_replaced_and_leaves_no_trace_in_the_digests(hostile, tmp_path, digests):
    config = hostile("die_once", mark=str(tmp_path / "died"), only_if="")
    (tmp_path / "died").touch()
    train(config, tmp_path / "whole", backend=HERE)
    (tmp_path / "died").unlink()
    train(config, tmp_path / "retried", backend=Backend(workers=1, retries=1))
    assert (tmp_path / "died").exists()
    assert digests(tmp_path / "retried") == digests(tmp_path / "whole")


@pytest.mark.dask
@pytest.mark.slow
def test_an_error_in_a_worker_comes_home_with_its_traceback_even_if_its_own_kind_cannot(hostile, tmp_path):
    (tmp_path / "now").touch()
    with pytest.raises(RolloutError, match="NotPicklable: carries a lock") as caught:
        train(hostile("raise_unpicklable"), tmp_path / "run", backend=Backend(workers=1))
    assert "in do_raise_unpicklable" in caught.value.about["traceback"]
    with pytest.raises(RolloutError, match="NotPicklable: carries a lock"):
        reproduce(EnvConfig.model_validate(caught.value.about["env"]), caught.value.about, caught.value.arrays)


@pytest.mark.dask
@pytest.mark.slow
def test_a_constructor_that_hangs_is_reported_before_anything_is_created(hostile, tmp_path):
    backend = Backend(workers=1, step_timeout_seconds=STEP_TIMEOUT)
    with pytest.raises(EnvError, match=r"did not return within 1 s(.|\n)*hostile_envs.py.* in __init__"):
        train(hostile("hang_in_constructor"), tmp_path / "run", backend=backend)
    assert not (tmp_path / "run").exists()


@pytest.mark.dask
@pytest.mark.slow
def test_what_an_environment_prints_on_a_worker_stays_out_of_what_the_command_prints(hostile, tmp_path, capfd):
    (tmp_path / "now").touch()
    settings = tmp_path / "settings.json"
    settings.write_text(hostile("print").model_dump_json())
    assert run(["train", str(settings), "--json", "--workers", "1", "--run", str(tmp_path / "run")]) == 0
    told = capfd.readouterr()
    assert len([json.loads(line) for line in told.out.splitlines()]) == 3
    assert "an environment that talks\n" in told.err
    assert "an environment that talks past Python\n" in told.err


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_what_an_environment_prints_is_lost_where_standard_error_cannot_be_written(hostile, tmp_path):
    (tmp_path / "now").touch()
    settings = tmp_path / "settings.json"
    settings.write_text(hostile("print_in_python").model_dump_json())
    command = [sys.executable, "-m", "metaloom.flows.cli", "train", str(settings), "--workers", "1"]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([*command, "--run", str(tmp_path / "run")], stdout=full, stderr=full).returncode == 0


def test_episodes_of_one_step_train_and_resume(hostile, tmp_path, digests):
    train(hostile("ends_at_once", only_if=""), tmp_path / "run", backend=HERE)
    assert (storage.open_run(tmp_path / "run")[2].rollouts(1).lengths == 1).all()


def test_replay_finds_an_environment_that_does_not_do_the_same_twice(hostile, tmp_path):
    config = hostile("random", only_if="")
    with pytest.raises(EnvError, match="two new copies"):
        train(config, tmp_path / "run", backend=HERE)
    config = config.model_copy(update={"env": config.env.model_copy(update={"copies": "kept"})})
    train(config, tmp_path / "run", backend=HERE)
    outcome = next(replay(tmp_path / "run", 0, stage="collect_rollouts", step=0))
    assert "observations" in {difference.array for difference in outcome.differences}


@pytest.mark.parametrize(
    ("fault", "statuses", "found"),
    [
        ("none", ["ok", "ok"], "identical in two runs"),
        ("random", ["fail"], "two new copies (observations at step 2 of episode 0) gave different results"),
        ("wrong_shape", ["fail"], "expected numbers of shape (2,)"),
        ("raise_in_constructor", ["fail"], "the licence server is away"),
    ],
)
def test_doctor_finds_what_is_wrong_with_an_environment(fault, statuses, found, capsys):
    code = run(["doctor", "--env", "hostile_envs:Hostile", "--set", f"env.options.fault={fault}", "--json"])
    checks = json.loads(capsys.readouterr().out)
    assert [check["status"] for check in checks] == statuses
    assert found in checks[-1]["found"]
    assert len(checks) == 1 or checks[0]["found"] == "2 of up to 100 steps"
    assert code == int("fail" in statuses)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["half-cheetah-dri"], "env.name is 'half-cheetah-dri'; did you mean half-cheetah-dir?"),
        (["point-corner", "--set", "env.options.rewrd=1"], "unexpected keyword argument 'rewrd'; allowed: reward,"),
        (["nowhere:Env"], "expected module:Class"),
    ],
)
def test_doctor_leaves_it_to_the_message_to_say_what_helps_where_no_environment_can_be_made(tokens, found, capsys):
    assert run(["doctor", "--env", *tokens]) == 1
    printed = capsys.readouterr().out
    assert found in printed
    assert "hostile_environments" not in printed


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["--set", "env.options.at=1"], "--set requires --env"),
        (["--env", "point-2d", "--set", "seed=1"], "only env settings are allowed"),
        (["--env", "x", "--set", "env.y=1"], "use env settings"),
    ],
)
def test_doctor_refuses_settings_of_anything_but_an_environment(tokens, found, capsys):
    assert run(["doctor", *tokens]) == 2
    assert found in capsys.readouterr().err


def test_what_an_environment_prints_in_this_process_goes_to_standard_error(hostile, tmp_path, capsys):
    train(hostile("print", only_if=""), tmp_path / "run", backend=HERE)
    printed = capsys.readouterr()
    assert "an environment that talks" in printed.err
    assert "an environment that talks\n" not in printed.out


@pytest.mark.dask
@pytest.mark.slow
def test_workers_of_a_scheduler_of_ones_own_are_watched_as_well(hostile, tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    (tmp_path / "now").touch()
    with cluster("--nanny") as address:
        backend = Backend(scheduler=address, step_timeout_seconds=30.0)
        with pytest.raises(
            RolloutError, match=r"task 0 .* episode 0 .*, step 2: its process died: Fatal .* Segmentation"
        ):
            train(hostile("segfault"), tmp_path / "run", backend=backend)


@pytest.mark.dask
@pytest.mark.slow
def test_a_cluster_whose_last_worker_is_gone_is_not_waited_for_for_ever(hostile, tmp_path, monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_NO_WORKER_SECONDS", 1.0)
    (tmp_path / "now").touch()
    with cluster("--no-nanny") as address, pytest.raises(WorkersError, match="has had no worker for 1 s"):
        train(hostile("exit"), tmp_path / "run", backend=Backend(scheduler=address, step_timeout_seconds=0.5))


@contextmanager
def cluster(nanny: str) -> Iterator[str]:
    """A scheduler and one worker as separate processes; yields the scheduler's address."""
    common = [sys.executable, "-m", "dask"]
    local = ["--no-dashboard", "--host", "127.0.0.1"]
    with ExitStack() as stack:
        scheduler = stack.enter_context(running([*common, "scheduler", "--port", "0", *local]))
        address = wait_for(scheduler, r"Scheduler at:\s+(tcp://127\.0\.0\.1:\d+)")
        worker = stack.enter_context(running([*common, "worker", address, "--nthreads", "1", nanny, *local]))
        wait_for(worker, r"(Registered to)")
        yield address


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    folder = Path(metaloom.flows.rollouts.dask.__file__).parents[1]
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"the process ended before it said {pattern}: {''.join(said)}")


def test_a_trainer_that_is_killed_between_calls_blames_no_environment(tmp_path, capsys):
    (tmp_path / "recordings").mkdir()
    _Trainer(0, 0, "no process has this mark", "env").tidy_up(tmp_path / "recordings", [])
    assert capsys.readouterr().err == (
        "metaloom: the trainer's process was killed. No environment was being called then. Stored data is safe: "
        "`metaloom resume` continues a run that `metaloom ls` lists\n"
    )
