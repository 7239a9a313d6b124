"""Recordings of processes that hang or die in a rollout: real processes, real ends."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metaloom import flows
from metaloom.flows.rollouts.flight_recorder import NOT_YET, RESET, read_recordings

PROJECT = Path(flows.__file__).parents[1]

RECORD = """
import os, sys, threading, time
from pathlib import Path
from metaloom.flows.rollouts.flight_recorder import recorded
from metaloom.stages.collect_rollouts import RolloutPosition

folder = Path(sys.argv[1])

def collect_rollouts(key, seconds, then, limit=1.0):
    with recorded(folder, key, limit, 2) as recorder:
        actions = recorder.actions((3, 2, 1), RolloutPosition(1, 0, 0, 4, 6))
        recorder.entered(None)
        for t in range(2):
            actions[t] = t + 1
            recorder.entered(t)
            recorder.row(1)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.02)
                recorder.entered(t)
                recorder.row(1)
        then()
"""


def leave(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RECORD + code, str(folder)], cwd=PROJECT, text=True, capture_output=True, timeout=60
    )


def test_a_process_that_dies_leaves_its_place_and_the_actions_so_far(tmp_path):
    for _ in range(2):
        leave(tmp_path, "collect_rollouts('a', 0, lambda: os._exit(3))")
    first, second = read_recordings(tmp_path, "a")
    assert first.place == second.place == (4, 6, 1, 1)
    assert first.actions[:, :, 0].tolist() == [[1, 1], [2, 2], [0, 0]]
    assert (first.timed_out, first.traceback) == (False, "")


def test_a_rollout_that_ended_leaves_nothing_to_the_next_of_its_name(tmp_path):
    leave(tmp_path, "collect_rollouts('a', 0, lambda: None); collect_rollouts('b', 0, lambda: os._exit(3))")
    assert read_recordings(tmp_path, "a") == []
    (recording,) = read_recordings(tmp_path, "b")
    assert np.array_equal(recording.actions[2], np.zeros((2, 1)))


def test_a_process_that_dies_before_it_samples_says_so(tmp_path):
    another = "folder /= 'a folder/of the next run'\nwith recorded(folder, 'a', 9): os.abort()"
    leave(tmp_path, f"with recorded(folder, 'z', 9): pass\n{another}")
    (recording,) = read_recordings(made := tmp_path / "a folder/of the next run", "a")
    assert recording.at.env_step == NOT_YET
    assert recording.traceback.startswith("Fatal Python error: Aborted")
    assert (made.stat().st_mode & 0o777, [*tmp_path.glob("*.idle")]) == (0o700, [])
    leave(tmp_path, "with recorded(folder, 'b', 9) as r: r.actions((1, 1, 1), RolloutPosition(1, 0, 0)); os._exit(3)")
    assert read_recordings(tmp_path, "b")[0].at.env_step == RESET


def test_a_call_that_returns_when_it_was_found_too_long_ends_its_process_all_the_same(tmp_path):
    notice = "(folder / f'{os.getpid()}-0.timeout').write_text('Timeout: ended from outside')"
    ended = leave(tmp_path, f"with recorded(folder, 'a', 9): {notice}\nprint('went on')")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert read_recordings(tmp_path, "a")[0].timed_out


@pytest.mark.slow
def test_a_thread_that_hangs_is_found_although_another_goes_on_and_only_it_is_blamed(tmp_path):
    ended = leave(
        tmp_path,
        "threading.Thread(target=collect_rollouts, args=('busy', 20, int, 3.0)).start();"
        "collect_rollouts('stuck', 0, lambda: time.sleep(30), 3.0)",
    )
    assert ended.returncode == -signal.SIGKILL
    (stuck,), (busy,) = (read_recordings(tmp_path, key) for key in ("stuck", "busy"))
    assert (stuck.timed_out, busy.timed_out) == (True, False)
    assert stuck.traceback.startswith("Timeout: ended from outside\n")
    assert "in collect_rollouts" in stuck.traceback
    assert stuck.traceback.count("hread 0x") == 1


@pytest.mark.slow
def test_whoever_gives_signs_of_life_is_not_ended(tmp_path):
    # A limit that a busy machine keeps no process waiting for.
    ended = leave(tmp_path, "collect_rollouts('a', 3.3, lambda: None, 3.0); time.sleep(3.3); print('alive')")
    assert ended.stdout == "alive\n", ended.stderr
