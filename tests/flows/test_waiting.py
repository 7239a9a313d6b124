"""Work that no worker will ever begin: how long it is waited for, and what is told."""

import logging
from types import SimpleNamespace

import dask.config
import pytest
from distributed import Client, LocalCluster

import metaloom.flows.rollouts.connection
from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.connection import Patience, PausedWorkers, wait_for

RUNNING = {"status": "running", "metrics": {}}
PAUSED = {"status": "paused", "metrics": {"task_counts": {"ready": 1}}}
ENDING = {"status": "paused", "metrics": {"task_counts": {"executing": 1}}}


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_NO_WORKER_SECONDS", 0.0)
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_LOOK_EVERY_SECONDS", 0.05)


class Workers:
    """A client of workers of which each is told as this, with what it was given."""

    def __init__(self, workers, given):
        self._workers, self._given = workers, given

    def scheduler_info(self, n_workers):
        assert n_workers == -1
        return {"workers": self._workers}

    def processing(self):
        return self._given


def look(monkeypatch, workers, given) -> bool:
    def nothing_is_done(futures, timeout):
        raise TimeoutError

    monkeypatch.setattr(metaloom.flows.rollouts.connection, "wait", nothing_is_done)
    futures = [SimpleNamespace(key=key, done=lambda: False) for key in ("x", "y")]
    return Patience(Workers(workers, given), 0.0).any_done(futures)


@pytest.mark.parametrize(
    ("workers", "given"),
    [
        ({"a": RUNNING}, {"a": ("x", "y")}),
        ({"a": ENDING}, {"a": ("x", "y")}),
        ({"a": PAUSED, "b": RUNNING}, {"a": ("x",), "b": ("y",)}),
        ({"a": PAUSED, "b": RUNNING}, {"a": ("x",)}),
        ({"a": PAUSED, "b": ENDING}, {"a": ("x",), "b": ("y",)}),
    ],
)
def test_what_somebody_does_or_may_begin_is_waited_for(monkeypatch, workers, given):
    assert not look(monkeypatch, workers, given)


@pytest.mark.parametrize(
    ("workers", "given", "told"),
    [
        ({"a": PAUSED}, {}, "paused 1 of 1 workers"),
        ({"a": PAUSED, "b": RUNNING}, {"a": ("x", "y", "z")}, "paused 1 of 2 workers"),
        ({"a": PAUSED, "b": PAUSED}, {"a": ("x",)}, "paused 2 of 2 workers"),
    ],
)
def test_what_only_paused_workers_have_is_given_up(monkeypatch, workers, given, told):
    with pytest.raises(PausedWorkers, match=rf"{told} .*--memory-limit.*metaloom resume"):
        look(monkeypatch, workers, given)


def test_work_without_workers_is_given_up(monkeypatch):
    with pytest.raises(WorkersError, match="has had no worker for 0 s"):
        look(monkeypatch, {}, {})


def test_workers_may_stay_away_for_two_step_timeouts_or_what_dask_is_set_to_counted_from_the_last_one(monkeypatch):
    now, here = [1000.0], {"a": RUNNING}
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "time", clock)
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "wait", lambda futures, timeout: None)
    futures = [SimpleNamespace(key="x", done=lambda: False)]
    for setting, seconds in ((None, 80.0), ("1m", 80.0), ("5m", 300.0)):
        with dask.config.set({"distributed.scheduler.no-workers-timeout": setting}):
            patience = Patience(Workers(workers := dict(here), {}), 40.0)
        for _ in range(2):
            assert not patience.any_done(futures)
            workers.clear()
            for passed in (0.0, seconds - 0.5):
                now[0] += passed
                assert not patience.any_done(futures)
            workers.update(here)
        workers.clear()
        assert not patience.any_done(futures)
        now[0] += seconds
        with pytest.raises(WorkersError, match=f"has had no worker for {seconds:g} s"):
            patience.any_done(futures)


def wait_for_ever(client):
    while True:
        wait_for(client, [client.submit(int, pure=False)])


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_that_dask_has_paused_is_told():
    ports = {"dashboard_address": "127.0.0.1:0", "worker_dashboard_address": "127.0.0.1:0"}
    workers = {"processes": False, "protocol": "tcp", "n_workers": 1, "threads_per_worker": 1, "memory_limit": "4GB"}
    with (
        dask.config.set({"distributed.worker.memory.pause": 1e-6}),
        LocalCluster(host="127.0.0.1", silence_logs=logging.CRITICAL, **workers, **ports) as cluster,
        Client(cluster) as client,
        pytest.raises(PausedWorkers, match="paused 1 of 1 workers for lack of memory"),
    ):
        wait_for_ever(client)
