"""A training that is told to end, or loses its console: everything committed stays, and the run has the same bits."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import metaloom.flows.interrupt
from metaloom import storage
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.interrupt import stop_on_interrupt
from metaloom.flows.rollouts.workers import Backend

HERE = Backend(workers=0)
SLOW_ONCE = """
import os, time
from hostile_envs import Hostile

class SlowOnce(Hostile):
    def reset(self, **options):
        if not os.path.exists(self.mark):
            open(self.mark, "w").close()
            time.sleep(600)
        return super().reset(**options)
"""


@pytest.fixture
def slow_once(tiny_config, tmp_path, monkeypatch):
    """A run whose first rollouts hardly come to an end, but only once."""
    (tmp_path / "interrupted_env.py").write_text(SLOW_ONCE)
    for path in (str(Path(__file__).parents[1] / "hostile"), str(tmp_path)):
        monkeypatch.syspath_prepend(path)
    monkeypatch.delitem(sys.modules, "interrupted_env", raising=False)
    monkeypatch.setattr(metaloom.flows.interrupt, "STAGE_SECONDS", 0.5)
    env = {"name": "interrupted_env:SlowOnce", "options": {"mark": str(tmp_path / "slept")}}
    return tiny_config(env=env, num_tasks=2, iterations=2)


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGHUP, 0),
        pytest.param(signal.SIGTERM, 1, marks=[pytest.mark.dask, pytest.mark.slow]),
    ],
)
def test_a_stage_that_takes_too_long_is_abandoned_and_resumed_with_the_same_bits(
    number, workers, slow_once, tmp_path, digests
):
    def ask_to_end():
        while not (tmp_path / "slept").exists():
            pass
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask_to_end)
    with stop_on_interrupt() as should_stop:
        asking.start()
        result = train(
            slow_once, tmp_path / "run", backend=Backend(workers=workers), observer=Observer(should_stop=should_stop)
        )
    asking.join()
    assert (result.stopped, result.iterations_done) == (True, 0)
    assert "sample_tasks" in {ref.stage for ref in storage.open_run(tmp_path / "run").refs()}
    assert storage.verify_run(tmp_path / "run") == []
    resume(tmp_path / "run", backend=HERE)
    train(slow_once, tmp_path / "whole", backend=HERE)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


def test_hang_ups_are_ignored_under_nohup(monkeypatch):
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, ignored)
