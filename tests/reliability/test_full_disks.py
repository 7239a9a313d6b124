"""A disk that is full, fails, is over quota or read-only, and a process out of file descriptors (T4)."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest

from metaloom import storage

ITERATIONS = 2
STRIDE = 47
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)


@pytest.fixture(scope="module")
def points(tmp_path_factory, write_points, train_tiny):
    """Count the write operations that the run takes."""
    names, path = [], tmp_path_factory.mktemp("counted") / "run"
    with write_points.before_each_write(lambda n, name, arguments: names.append(name)):
        train_tiny(path, iterations=ITERATIONS)
    return len(names)


def test_the_page_says_how_many_faults_are_tried(points, on_page):
    tried = on_page("at each of the NUMBER write points of a two-iteration run, .* every NUMBERth, alternating")
    assert tried == [pytest.approx(points, rel=0.05), STRIDE]


@pytest.fixture
def stays_whole(tmp_path, finish, digests, tiny_runs):
    """Require that what a fault has left can be read, and finished once the fault is gone."""
    expected = digests(tiny_runs(ITERATIONS))

    def check(path, about):
        if (path / "run.json").exists():
            assert storage.verify_run(path) == [], about
            assert digests(path).items() <= expected.items(), about
        finish(path, iterations=ITERATIONS)
        assert digests(path) == expected, about
        assert storage.verify_run(path) == [], about

    return check


def raised_by(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except (OSError, storage.StoreError) as error:
        return error
    return None


@pytest.fixture
def fail_and_resume(tmp_path, write_points, train_tiny, stays_whole):
    """Lets writes fail from a point on, and checks that training stops with a message and can be gone on with."""

    def check(point, number, *, for_ever):
        path, about = tmp_path / "run", f"{errno.errorcode[number]} at {point}"
        with write_points.before_each_write(write_points.fail_at(point, number, for_ever=for_ever)):
            error = raised_by(train_tiny, path, iterations=ITERATIONS)
        assert isinstance(error, storage.StorageFailed), about
        assert os.strerror(number) in str(error), about
        assert "resume" in str(error) or "METALOOM_RUNS" in str(error), about
        stays_whole(path, about)
        shutil.rmtree(path)

    return check


@pytest.mark.slow
@pytest.mark.no_cover
def test_an_error_of_the_system_at_any_of_a_sample_of_writes_stops_the_run_and_loses_nothing(points, fail_and_resume):
    faults = itertools.cycle(itertools.product(ERRORS, (True, False)))
    for point in range(0, points, STRIDE):
        number, for_ever = next(faults)
        fail_and_resume(point, number, for_ever=for_ever)


@pytest.mark.sweep
@pytest.mark.timeout(0)
def test_an_error_of_the_system_at_every_write_stops_the_run_and_loses_nothing(points, fail_and_resume):
    for point, for_ever in itertools.product(range(points), (True, False)):
        fail_and_resume(point, ERRORS[point % len(ERRORS)], for_ever=for_ever)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of a given size, mounted; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options, *more):
        return subprocess.run(["mount", *more, "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)

    done = mount("size=400k")
    if done.returncode:
        pytest.skip(f"this system does not let us mount: {done.stderr.decode().strip()}")
    yield folder, lambda options: mount(f"remount,{options}").check_returncode()
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_more_room_lets_it_go_on(small_disk, train_tiny, stays_whole):
    folder, remount = small_disk
    with pytest.raises(storage.StorageFailed, match=r"No space left on device.*Free space.*metaloom resume .*/run"):
        train_tiny(folder / "run", iterations=ITERATIONS)
    assert shutil.disk_usage(folder).free < 2**16
    assert storage.open_run(folder / "run").refs() != []
    remount("size=8m")
    stays_whole(folder / "run", "a full disk")


def test_a_disk_that_is_read_only_can_be_read_and_refuses_writers_with_advice(small_disk, train_tiny, finish, digests):
    folder, remount = small_disk
    remount("size=8m")
    train_tiny(folder / "run", iterations=1)
    expected = digests(folder / "run")
    remount("ro")
    assert storage.verify_run(folder / "run") == []
    assert digests(folder / "run") == expected
    with pytest.raises(storage.StorageFailed, match=r"Read-only file system.*permissions"):
        finish(folder / "run")
    with pytest.raises(storage.StorageFailed, match=r"Read-only file system.*METALOOM_RUNS"):
        train_tiny(folder / "another", iterations=1)
    remount("rw")
    finish(folder / "run")


SHORT_OF_DESCRIPTORS = """
import json, os, resource, sys
from pathlib import Path
from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config

def error_of(path):
    try:
        train(build_config(json.loads(sys.argv[2])), path, backend=Backend(workers=0))
    except (OSError, storage.StoreError) as error:
        return str(error), isinstance(error, storage.StorageFailed), getattr(error, "__notes__", [])

error_of(Path(sys.argv[1], "first"))  # libraries open what they keep
taken = {int(name) for name in os.listdir("/proc/self/fd")}
free = [number for number in range(len(taken) + 30) if number not in taken]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
errors = []
for spare in range(16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
    errors.append(error_of(Path(sys.argv[1], f"run-{spare}")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(json.dumps(errors))
"""


def test_running_out_of_file_descriptors_stops_the_run_and_loses_nothing(tmp_path, tiny_json, stays_whole):
    """In a process of its own: where threads of earlier tests open and close files, the limit is another each time."""
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS, tmp_path, tiny_json(iterations=ITERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    for spare, error in enumerate(errors):
        path = tmp_path / f"run-{spare}"
        if error is not None:
            message, failed_storing, notes = error
            assert "Too many open files" in message
            # What a stage or its environment opens itself fails with the system's error, and says in which stage.
            in_a_stage = [note for note in notes if f"{path}: in iteration" in note]
            assert failed_storing or in_a_stage or not path.exists(), error
        stays_whole(path, f"{spare} spare descriptors")
    assert sum(error is not None for error in errors) > 2


def test_a_lock_that_cannot_be_emptied_lets_the_next_writer_in(tmp_path, train_tiny, finish, monkeypatch):
    def refuse(descriptor, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = train_tiny(tmp_path / "run", iterations=1)
    writer = storage.open_writer(path)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(storage.StorageFailed, match="Input/output error"):
        writer.close()
    monkeypatch.undo()
    finish(path)
