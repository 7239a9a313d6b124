"""A hung step is noticed within twice the step timeout (T33), counted by clocks of our own and not by the machine's."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom.flows.rollouts import flight_recorder, guard


class Clock:
    """A clock that only sleeping and `pass_seconds` move on."""

    def __init__(self):
        self.now = 1000.0
        self.looks = 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.looks += 1
        self.pass_seconds(seconds)

    def pass_seconds(self, seconds):
        self.now += seconds


@given(timeout=st.floats(0.5, 1000), steps=st.lists(st.floats(0, 0.4), max_size=30))
def test_a_step_is_given_all_of_its_time_and_at_most_a_tenth_more_and_two_from_outside(timeout, steps):
    clock, inside, outside = Clock(), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight_recorder, "time", clock)
        patch.setattr(flight_recorder, "_set_deadline", lambda dog, deadline, report: inside.append(deadline))
        dog = flight_recorder.Watchdog(timeout, _Report(), outside.append)
        for step in steps:
            dog.alive()
            clock.pass_seconds(step * timeout)
        dog.alive()
    rounding = 1e-9 * clock.now
    assert timeout - rounding <= inside[-1] - clock.now <= 1.1 * timeout + rounding
    assert inside[-1] < outside[-1] <= clock.now + 1.2 * timeout + rounding


class _Report:
    """A file of nothing."""

    def open(self, *_, **__):
        return SimpleNamespace(fileno=lambda: -1)


@pytest.mark.parametrize("timeout", [0.5, 1.0, 5.0, 60.0])
def test_a_process_that_stopped_itself_in_a_step_is_ended_from_outside_within_twice_the_timeout(
    tmp_path, monkeypatch, timeout
):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        clock, told = Clock(), []
        monkeypatch.setattr(guard, "time", clock)
        monkeypatch.setattr(flight_recorder, "time", clock)
        monkeypatch.setattr(flight_recorder, "_set_deadline", lambda *_: None)
        flight_recorder.Watchdog(timeout, _Report(), told.append).alive()
        hung = clock.now
        born = guard.started(process.pid)
        header = guard.Header(process.pid, 0, 2, 0, 4, 1, 1, 0, 0, 0, 0, 1, born, told[-1])
        (tmp_path / "one.recording").write_bytes(guard._LAYOUT.pack(*header))
        (tmp_path / f"{process.pid}-0.timeout").touch()
        sleep = clock.sleep

        def look_again(seconds):
            if process.poll() is not None:
                (tmp_path / "one.recording").unlink(missing_ok=True)  # as whoever started it does
            sleep(seconds)

        monkeypatch.setattr(clock, "sleep", look_again)
        killed = []
        monkeypatch.setattr(
            psutil.Process, "kill", lambda self: killed.append(clock.now) or process.kill() or process.wait()
        )
        guard._watch(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert len(killed) == 1
    assert timeout <= killed[0] - hung <= 2 * timeout
    assert (tmp_path / f"{process.pid}-0.timeout").read_text().startswith(guard.STOPPED)
    # One look after the deadline is enough.
    assert clock.looks <= 1.2 * timeout / guard._LOOK_EVERY_SECONDS + 2
