"""A hung step is noticed within twice the step timeout (T33), counted by clocks of our own and not by the machine's."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
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


@pytest.fixture
def recorder_at(tmp_path, monkeypatch):
    """Make a recorder that goes by a clock and is watched by nobody."""
    monkeypatch.setattr(flight_recorder, "start_guard", lambda folder: None)
    monkeypatch.setattr(flight_recorder, "_report_crashes", lambda folder: None)

    def make(clock: Clock, timeout: float) -> flight_recorder.FlightRecorder:
        monkeypatch.setattr(flight_recorder, "time", clock)
        recorder = flight_recorder.FlightRecorder(tmp_path, timeout)
        recorder.begin("one", 1)
        return recorder

    return make


def test_who_records_nothing_has_no_deadline_and_may_be_closed_when_the_folder_is_gone(recorder_at, tmp_path):
    recorder = flight_recorder.FlightRecorder(tmp_path / "of another", 60.0)
    assert guard.Header.read(recorder._file).deadline == 0
    shutil.rmtree(tmp_path / "of another")
    recorder.close()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"env_step": guard.NOT_YET}, "while it was being built"),
        ({"env_step": guard.RESET}, "iteration 12, inner step 1: tasks from 4 on, in reset"),
        ({"env_step": 0, "row": 0}, "iteration 12, inner step 1: task 4, episode 6, step 0"),
        ({"env_step": 9, "row": 7}, "iteration 12, inner step 1: task 6, episode 7, step 9"),
    ],
)
def test_the_place_of_a_rollout_is_put_into_words(place, words):
    at = guard.Header(1, 0, 0, -1, 0, 0, 0, 4, 6, 12, 1, 3, 0.0, 0.0)
    assert at._replace(**place).words() == words


def test_a_process_is_told_from_an_earlier_one_of_its_number_by_the_time_at_which_it_was_started():
    seconds = guard.started(os.getpid()) / os.sysconf("SC_CLK_TCK")
    assert abs(psutil.boot_time() + seconds - psutil.Process().create_time()) < 2


def test_only_its_owner_can_read_the_folder_of_a_trainer_whoever_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_trained", [])
    for _ in range(2):
        guard.register_trainer(folder := tmp_path / "of a session", "mark", "env")
    assert folder.stat().st_mode & 0o777 == 0o700


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(timeout=st.floats(0.5, 1000), steps=st.lists(st.floats(0, 0.4), max_size=30))
def test_a_step_is_given_all_of_its_time_and_at_most_a_tenth_more(recorder_at, timeout, steps):
    clock = Clock()
    recorder = recorder_at(clock, timeout)
    for step in steps:
        recorder.row(0)
        clock.pass_seconds(step * timeout)
    recorder.row(0)
    rounding = 1e-9 * clock.now
    deadline = guard.Header.read(recorder._file).deadline
    recorder.close()
    assert timeout - rounding <= deadline - clock.now <= 1.1 * timeout + rounding


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("timeout", [0.5, 1.0, 5.0, 60.0])
def test_a_process_that_hangs_in_a_step_or_stopped_itself_is_ended_within_twice_the_timeout(
    tmp_path, monkeypatch, recorder_at, timeout, stops
):
    ignores = f"import signal, time; signal.signal({int(guard.TRACEBACK)}, signal.SIG_IGN); print(1); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-uc", ignores], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        if stops:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        clock = Clock()
        monkeypatch.setattr(guard, "time", clock)
        recorder = recorder_at(clock, timeout)
        hung, deadline = clock.now, guard.Header.read(recorder._file).deadline
        recorder.close()
        born = guard.started(process.pid)
        header = guard.Header(process.pid, 0, 2, 0, 4, 1, 1, 0, 0, 0, 0, 1, born, deadline)
        (tmp_path / "one.recording").write_bytes(guard.HEADER.pack(*header))
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
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(killed) == 1
    assert timeout <= killed[0] - hung <= 2 * timeout
    assert (tmp_path / f"{process.pid}-0.timeout").read_text().startswith(guard.STOPPED if stops else "Timeout")
    # One look after the deadline is enough, or two for one that is asked for its tracebacks.
    assert clock.looks <= 1.1 * timeout / guard._LOOK_EVERY_SECONDS + 3
