"""Processes that die, stop or vanish around a run (T5, T6): what is committed stays, and the bits are the same."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import distributed  # noqa: F401  # has to have set its defaults before a test changes one
import psutil
import pytest

from metaloom import storage
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.storage import StageRef

CHEETAH = {
    "env": "half-cheetah-dir",
    "algorithm": {"name": "promp", "num_epochs": 1},
    "policy": {"hidden_sizes": [8]},
    "iterations": 2,
    "num_tasks": 8,
    "episodes_per_task": 10,
    "max_episode_steps": 100,
    "seed": 3,
}


@pytest.fixture(scope="module")
def config():
    return build_config(CHEETAH)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, config, digests):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config, path, backend=Backend(workers=0))
    return digests(path)


def during(ref, act):
    """Act shortly after a stage has begun."""

    def watch(started):
        if started == ref:
            threading.Timer(0.1, act).start()

    return Observer(stage_started=watch)


def worker_processes():
    return [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_that_stops_for_ever_is_replaced_and_changes_no_digest(tmp_path, config, digests, expected):
    stopped = []

    def stop_a_worker():
        busiest = max(worker_processes(), key=lambda process: sum(process.cpu_times()[:2]))
        busiest.send_signal(signal.SIGSTOP)
        stopped.append(busiest)

    try:
        with dask.config.set({"distributed.scheduler.worker-ttl": "2s"}):
            observer = during(StageRef(1, "collect_rollouts"), stop_a_worker)
            train(config, tmp_path / "run", backend=Backend(workers=2), observer=observer)
        assert stopped
        assert digests(tmp_path / "run") == expected
    finally:
        for process in stopped:
            if process.is_running():
                process.kill()


@pytest.fixture
def scheduler(tmp_path):
    """A scheduler and a worker in processes of their own."""
    address = tmp_path / "scheduler.json"
    root = Path(storage.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    about = ["--scheduler-file", str(address)]
    loopback = ["--host", "127.0.0.1", "--no-dashboard"]
    commands = [["scheduler", *loopback, "--port", "0"], ["worker", *loopback, "--nthreads", "1"]]
    processes = []
    for kind, *options in commands:
        program = [sys.executable, "-m", "dask", kind, *about, *options]
        processes.append(subprocess.Popen(program, cwd=root, env=environment, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 60
        while not address.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield processes[0], address
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.dask
@pytest.mark.slow
def test_a_scheduler_that_is_killed_costs_time_and_no_data(tmp_path, config, digests, expected, scheduler):
    process, file = scheduler
    address = json.loads(file.read_text())["address"]
    observer = during(StageRef(1, "collect_rollouts"), process.kill)
    with pytest.raises(WorkersError, match=r"iteration 1, inner step 0: the Dask scheduler is gone .*metaloom resume"):
        train(config, tmp_path / "run", backend=Backend(scheduler=address), observer=observer)
    assert storage.verify_run(tmp_path / "run") == []
    assert len(storage.open_run(tmp_path / "run")) == 1
    resume(tmp_path / "run", backend=Backend(workers=0))
    assert digests(tmp_path / "run") == expected
