"""Kills, stopped processes, power cuts, second writers: what was committed stays, what was not is invisible."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.write import sessions
from metaloom.storage.write.holder import is_asked_to_stop

WRITER = """
import itertools, sys, time
import numpy as np
from metaloom import storage
from metaloom.pipeline.types import TaskBatch
from metaloom.storage import StageRef

path, pause = sys.argv[1], float(sys.argv[2])
try:
    with storage.open_writer(path) as writer:
        first = len(writer.run.refs())
        for i in range(first, writer.capacity):
            tasks = TaskBatch(np.full((200, 3), float(i)), np.full(200, i), tuple("abc"), ("1",) * 3)
            writer.put(StageRef(i, "sample_tasks"), tasks, inputs=[], seed_position=[i], started=0.0, seconds=0.0)
            print(i, flush=True)
            time.sleep(pause)
except storage.FencedOut as error:
    print("fenced", flush=True)
"""


@pytest.fixture
def start_writer():
    started = []

    def start(path, pause=0.0):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(pause)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def empty_run(tmp_path, creation):
    storage.create_run(tmp_path / "run", capacity=100_000, **creation).close()
    return tmp_path / "run"


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_run_that_goes_on_where_it_was(empty_run, start_writer):
    moments, counts = random.Random(0), []
    for _ in range(5):
        process = start_writer(empty_run)
        process.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        assert storage.verify_run(empty_run) == []
        refs = storage.open_run(empty_run).refs()
        assert refs == [StageRef(i, "sample_tasks") for i in range(len(refs))]
        counts.append(len(refs))
    assert counts == sorted(counts)
    assert counts[-1] > 10
    run = storage.open_run(empty_run)
    assert all((run[i].tasks().params == i).all() for i in range(counts[-1]))
    sequences = sorted(run.record(ref).sequence for ref in run.refs())
    assert sequences == list(range(counts[-1]))


def test_a_second_writer_is_refused_and_told_who_where_and_since_when(empty_run):
    with storage.open_writer(empty_run), pytest.raises(storage.RunLocked) as refused:
        storage.open_writer(empty_run)
    message = str(refused.value)
    assert f"process {os.getpid()} on {os.uname().nodename}" in message
    assert "since 20" in message
    assert "--take-over" in message
    storage.open_writer(empty_run).close()


def test_a_lock_names_its_holder_alone_whoever_held_it_before_and_afterwards_nobody(make_run):
    lock = make_run(1) / "writer.lock"
    lock.write_text("x" * 2000)  # longer than what a holder writes
    with storage.open_writer(lock.parent), pytest.raises(storage.RunLocked, match=rf"process {os.getpid()} on "):
        storage.open_writer(lock.parent)
    assert lock.read_bytes() == b""


def test_a_session_that_cannot_begin_lets_the_next_writer_in(make_run, monkeypatch):
    path = make_run(1)
    with monkeypatch.context() as full:
        full.setattr("metaloom.storage.write.sessions._begin", lambda *_: os.open("/nowhere/at/all", os.O_RDONLY))
        with pytest.raises(storage.StorageFailed, match="No such file") as kept:  # with all that it refers to
            storage.open_writer(path)
    storage.open_writer(path).close()
    assert kept.value


def test_the_lock_of_a_killed_writer_is_free(empty_run, start_writer):
    process = start_writer(empty_run, pause=30)
    process.stdout.readline()
    with pytest.raises(storage.RunLocked, match=str(process.pid)):
        storage.open_writer(empty_run)
    process.kill()
    process.wait()
    storage.open_writer(empty_run).close()


def test_a_writer_that_was_taken_over_can_publish_nothing_any_more(make_run, put, batches, run_digests):
    path = make_run(1, capacity=3)
    zombie = storage.open_writer(path)
    before = run_digests(path)
    with storage.open_writer(path, take_over=True) as heir:
        put(zombie, batches.iteration(1)[:1])
        with pytest.raises(storage.FencedOut):
            zombie.flush()
        with pytest.raises(storage.FencedOut):
            zombie.close()
        assert run_digests(path) == before
        put(heir, batches.iteration(1))
        with pytest.raises(storage.RunLocked):  # the zombie's end did not free the heir's lock
            storage.open_writer(path)
    assert storage.verify_run(path) == []
    assert len(storage.open_run(path).iterations) == 2


@pytest.mark.parametrize("moment", ["write_aside", "replace", "publish"])
def test_a_writer_that_is_taken_over_in_the_middle_of_a_put_changes_nothing(
    make_run, put, batches, run_digests, monkeypatch, moment
):
    path = make_run(1, capacity=3)
    zombie = storage.open_writer(path)
    heirs, call, before = [], getattr(sessions.Session, moment), run_digests(path)

    def stop_here(session, *arguments):
        if session is zombie._session and not heirs:
            heirs.append(storage.open_writer(path, take_over=True))
            put(heirs[0], rival)
            heirs[0].flush()
        return call(session, *arguments)

    first, rival = batches.iteration(1)[:1], batches.iteration(1)[:1]
    monkeypatch.setattr(sessions.Session, moment, stop_here)
    put(zombie, first)
    with pytest.raises(storage.FencedOut):
        zombie.close()
    heirs[0].close()
    digest = storage.output_digest(storage.digest(rival[0][1]))
    assert run_digests(path) == before | {StageRef(1, "sample_tasks"): digest}
    assert storage.verify_run(path) == []


@pytest.mark.slow
def test_a_stopped_process_that_wakes_up_after_a_take_over_is_fenced_out(empty_run, start_writer):
    zombie = start_writer(empty_run)
    zombie.stdout.readline()
    os.kill(zombie.pid, signal.SIGSTOP)
    with storage.open_writer(empty_run, take_over=True) as heir:
        stored = heir.run.refs()
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(300) == 0
        assert zombie.stdout.read().endswith("fenced\n")
        assert heir.run.refs() == stored
    assert storage.verify_run(empty_run) == []


@pytest.mark.slow
@pytest.mark.no_cover
def test_at_every_write_the_disk_holds_a_whole_run_that_can_be_finished(
    tmp_path, creation, put, make_batches, monkeypatch, run_digests, distinct
):
    batches = make_batches(B=1, E=1, T=2, O=1, A=1)
    outputs = [output for i in range(2) for output in batches.iteration(i, rounds=1)]
    path, snapshots = tmp_path / "run", tmp_path / "snapshots"
    snapshots.mkdir()
    with storage.create_run(path, capacity=2, **creation) as writer:
        _before_each_write(monkeypatch, lambda n: shutil.copytree(path, snapshots / f"{n:04d}"))
        put(writer, outputs)
    monkeypatch.undo()
    expected = run_digests(path)
    taken = sorted(snapshots.iterdir())
    assert len(taken) > 100
    for snapshot in distinct(taken):
        assert storage.verify_run(snapshot) == [], snapshot.name
        found = run_digests(snapshot)
        assert list(found) == [ref for ref, _, _ in outputs][: len(found)]
        assert found.items() <= expected.items()
    for snapshot in taken[::25]:
        with storage.open_writer(snapshot) as writer:
            put(writer, [output for output in outputs if not writer.contains(output[0])])
        assert run_digests(snapshot) == expected
        assert storage.verify_run(snapshot) == []


def test_nothing_is_committed_before_everything_it_names_would_survive_a_power_cut(make_run, monkeypatch):
    safe, unsafe_folders, problems = set(), set(), []
    fsync, move, link, mkdir = os.fsync, os.replace, os.link, os.mkdir

    def watch_fsync(descriptor):
        fsync(descriptor)
        safe.add(os.fstat(descriptor).st_ino)
        unsafe_folders.discard(os.fstat(descriptor).st_ino)

    def watch_move(source, target):
        if os.stat(source).st_ino not in safe:
            problems.append(f"{target} was not synced")
        unsafe_folders.add(os.stat(target.parent).st_ino)
        move(source, target)

    def watch_link(source, target):
        if os.stat(source).st_ino not in safe:
            problems.append(f"{target} was not synced")
        if unsafe_folders:
            problems.append(f"{len(unsafe_folders)} folders were not synced before {target}")
        unsafe_folders.add(os.stat(target.parent).st_ino)
        link(source, target)

    def watch_mkdir(path, *arguments):
        mkdir(path, *arguments)
        unsafe_folders.add(os.stat(path.parent).st_ino)

    monkeypatch.setattr(os, "mkdir", watch_mkdir)
    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_move)
    monkeypatch.setattr(os, "link", watch_link)
    make_run(2)
    assert problems == []
    assert len(safe) > 50


@pytest.mark.parametrize("damage", ["missing", "cut short", "flipped byte", "record"])
def test_a_damaged_output_is_taken_out_by_repair_and_computed_again(make_run, put, make_batches, run_digests, damage):
    path = make_run(3)
    expected = run_digests(path)
    chunk = path / "data.zarr/rollouts_0/rewards/c.1.0.0.0"
    match damage:
        case "missing":
            chunk.unlink()
        case "cut short":
            os.truncate(chunk, 7)
        case "flipped byte":
            chunk.write_bytes(chunk.read_bytes()[:-9] + bytes(9))
        case _:
            os.truncate(path / "_commits" / StageRef(1, "collect_rollouts").file_name, 100)
    if damage != "flipped byte":  # reading everything is left to `verify` and to a repair
        with pytest.raises(storage.DamagedRun, match=r"rewards.*--repair|collect_rollouts.*--repair"):
            storage.open_writer(path)
    again = make_batches()
    outputs = [output for i in range(3) for output in again.iteration(i)]
    with storage.open_writer(path, repair=True) as writer:
        assert len(writer.run.iterations) == 1
        missing = [output for output in outputs if not writer.contains(output[0])]
        assert [ref for ref, _, _ in missing] == [StageRef(1, "collect_rollouts", 0), StageRef(1, "meta_optimize")]
        assert not any("of the history are missing" in line for line in writer.repaired)
        put(writer, missing)
    assert run_digests(path) == expected
    assert storage.verify_run(path) == []


def damage_any(path):
    """Ways to damage a file, by name."""
    content = path.read_bytes()
    half = len(content) // 2
    ways = {
        "flipped": lambda: path.write_bytes(content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]),
        "cut": lambda: os.truncate(path, half),
        "lost": lambda: path.unlink(),
        "folder": lambda: (path.unlink(), path.mkdir()),
    }
    return ways if content else {"lost": ways["lost"], "folder": ways["folder"]}


@pytest.mark.parametrize("which", ["one of each kind", pytest.param("all", marks=pytest.mark.sweep)])
def test_any_one_damaged_file_is_mended_or_computed_again_by_repair(
    make_run, put, make_batches, run_digests, tmp_path, which
):
    whole = make_run(2, name="whole", B=2, E=1, T=3)
    batches = make_batches(B=2, E=1, T=3)
    outputs = [output for i in range(2) for output in batches.iteration(i)]
    expected = run_digests(whole)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    dice = random.Random(1)
    if which != "all":  # of an iteration and a step, which are the numbers in its path
        dice.shuffle(files)
        files = {re.sub(r"\d", "", str(file)): file for file in files}.values()
    for relative in files:
        ways = damage_any(whole / relative)
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        way = dice.choice(sorted(ways))
        damage_any(path / relative)[way]()
        with storage.open_writer(path, repair=True) as writer:
            put(writer, [output for output in outputs if not writer.contains(output[0])])
        assert run_digests(path) == expected, f"{relative} {way}"
        assert storage.verify_run(path) == [], f"{relative} {way}"
        assert storage.open_run(path).capacity == 2, f"{relative} {way}"


@pytest.mark.parametrize("stage", ["sample_tasks", "process_samples", "meta_optimize"])
def test_an_output_whose_record_was_deleted_is_computed_again_and_the_history_stays_whole(
    make_run, put, make_batches, run_digests, stage
):
    path = make_run(2)
    expected = run_digests(path)
    (path / "_commits" / StageRef(1, stage).file_name).unlink()
    assert storage.verify_run(path) != []
    again = make_batches()
    outputs = [output for i in range(2) for output in again.iteration(i)]
    with storage.open_writer(path) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    assert run_digests(path) == expected
    assert storage.verify_run(path) == []


def _before_each_write(monkeypatch, act):
    count = iter(range(10**6))
    for name in ("replace", "link", "fsync"):
        original = getattr(os, name)

        def call(*arguments, original=original):
            act(next(count))
            return original(*arguments)

        monkeypatch.setattr(os, name, call)


def test_a_request_to_a_dead_writer_that_another_removes_meanwhile_is_no_error(make_run, monkeypatch):
    path, glob = make_run(1), Path.glob
    storage.ask_to_stop(path, "a" * 16)

    def lose(folder, pattern):
        found = [*glob(folder, pattern)]
        for file in found:
            file.unlink()
        return iter(found)

    monkeypatch.setattr(Path, "glob", lose)
    storage.ask_to_stop(path, "b" * 16)
    assert [is_asked_to_stop(path, letter * 16) for letter in "ab"] == [False, True]
