"""Processes that die, stop or vanish around a run (T5, T6): what is committed stays, and the bits are the same."""

import re
import signal
import threading

import psutil
import pytest
from kept_cluster import kept_cluster
from prefect_server import wait_for

import metaloom.flows.rollouts.connection
import metaloom.flows.rollouts.local_cluster
from metaloom import storage
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.storage import StageRef

pytestmark = pytest.mark.usefixtures("warm")

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
def test_a_worker_that_stops_for_ever_is_replaced_and_changes_no_digest(
    tmp_path, config, digests, expected, monkeypatch
):
    stopped = []

    def stop_a_worker():
        busiest = max(worker_processes(), key=lambda process: sum(process.cpu_times()[:2]))
        busiest.send_signal(signal.SIGSTOP)
        stopped.append(busiest)

    try:
        monkeypatch.setitem(metaloom.flows.rollouts.local_cluster._SETTINGS, "distributed.scheduler.worker-ttl", "2s")
        observer = during(StageRef(1, "collect_rollouts"), stop_a_worker)
        train(config, tmp_path / "run", backend=Backend(workers=2), observer=observer)
        assert stopped
        assert digests(tmp_path / "run") == expected
    finally:
        for process in stopped:
            if process.is_running():
                process.kill()


@pytest.mark.dask
@pytest.mark.slow
def test_a_scheduler_that_is_killed_costs_time_and_no_data(tmp_path, config, digests, expected, monkeypatch, caplog):
    """It is killed in a round and between two, and waited for, with new workers; then it stays away.

    In between, its only worker ends between two stages, as where workers are scaled to zero.
    """
    killed_in = (StageRef(0, "collect_rollouts", 1), StageRef(0, "meta_optimize"))
    starts = list[int]()
    with kept_cluster(workers=1) as cluster:
        backend = Backend(scheduler=cluster.address)

        def kill(ref):
            if ref in killed_in:
                threading.Timer(0.1, cluster.scheduler.kill).start()
            if ref == StageRef(1, "adapt"):
                starts.append(cluster.workers[0].starts)
                cluster.workers[0].kill()

        train(config, tmp_path / "run", backend=backend, observer=Observer(stage_started=kill))
        assert digests(tmp_path / "run") == expected
        assert [cluster.workers[0].starts - before for before in starts] == [1]
        assert cluster.scheduler.starts == 3
        assert "iteration 0, inner step 1: the Dask scheduler is gone; waiting up to 300 s" in caplog.text
        assert "Traceback" not in caplog.text
        assert re.search(r"iteration 0, inner step 1: the Dask scheduler is back after \d+ s", caplog.text)
        monkeypatch.setattr(metaloom.flows.rollouts.connection, "_BACK_SECONDS", 1.0)
        monkeypatch.setattr(metaloom.flows.rollouts.connection, "_ANSWER_SECONDS", 1.0)
        monkeypatch.setattr(metaloom.flows.rollouts.connection, "no_worker_seconds", lambda: 1.0)
        observer = during(StageRef(1, "collect_rollouts"), cluster.scheduler.end)
        gone = r"iteration 1, inner step 0: the Dask scheduler is gone .*metaloom resume"
        with pytest.raises(WorkersError, match=gone):
            train(config, tmp_path / "ended", backend=backend, observer=observer)
    assert storage.verify_run(tmp_path / "ended") == []
    assert len(storage.open_run(tmp_path / "ended")) == 1
    resume(tmp_path / "ended", backend=Backend(workers=0))
    assert digests(tmp_path / "ended") == expected


@pytest.mark.dask
@pytest.mark.sweep
def test_a_scheduler_that_is_stopped_is_waited_for_as_one_that_is_gone(
    tmp_path, config, digests, expected, monkeypatch, caplog
):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_LOOK_EVERY_SECONDS", 0.5)
    told = "iteration 0, inner step 1: the Dask scheduler is gone"
    with kept_cluster(workers=1) as cluster:

        def go_on():
            wait_for(lambda: told in caplog.text, "its silence is noticed")
            monkeypatch.setattr(metaloom.flows.rollouts.connection, "_SILENT_SECONDS", 30.0)
            cluster.scheduler.go_on()

        going_on = threading.Thread(target=go_on)

        def pause(ref):
            if ref == StageRef(0, "collect_rollouts", 1):
                # Not before: on a busy machine, one that starts takes long to answer.
                monkeypatch.setattr(metaloom.flows.rollouts.connection, "_SILENT_SECONDS", 1.0)
                cluster.scheduler.pause()
                going_on.start()

        backend = Backend(scheduler=cluster.address)
        train(config, tmp_path / "run", backend=backend, observer=Observer(stage_started=pause))
        going_on.join()
        assert cluster.scheduler.starts == 1
    assert f"the Dask scheduler at {cluster.address} has not answered for " in caplog.text
    assert "Traceback" not in caplog.text
    assert digests(tmp_path / "run") == expected
