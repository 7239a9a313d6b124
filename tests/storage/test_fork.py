"""A fork is a whole run of its own that shares its parent's files."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.keep import fork as forking
from metaloom.storage.write.holder import acquire_lock

pytestmark = pytest.mark.usefixtures("warm")

CONFIG = {"config": {"seed": 1, "lr": 0.5}, "config_digest": "def", "environment": {"code": "none"}}


@pytest.fixture
def fork(tmp_path):
    def make(parent: Path, iteration: int, name: str = "fork", capacity: int = 4, **about) -> storage.Fork:
        about = {**CONFIG, **about}
        return storage.fork_run(storage.open_run(parent), iteration, tmp_path / name, capacity=capacity, **about)

    return make


@pytest.fixture
def go_on(put, make_batches):
    def write(path: Path, *iterations: int, seed: int = 5) -> None:
        batches = make_batches(seed=seed)
        with storage.open_writer(path) as writer:
            for i in iterations:
                put(writer, [output for output in batches.iteration(i) if not writer.contains(output[0])])

    return write


def test_a_fork_has_the_parents_iterations_before_it_and_goes_on_with_its_own(make_run, fork, go_on, run_digests):
    parent = make_run(3)
    made = fork(parent, 2)
    before = run_digests(parent)
    assert run_digests(made.path) == {ref: digest for ref, digest in before.items() if ref.iteration < 2}
    go_on(made.path, 2, 3)
    run = storage.open_run(made.path)
    assert list(run.iterations) == [0, 1, 2, 3]
    assert run.metrics().num_rows == 4
    assert run.episodes()["iteration"].to_pylist() == sorted(run.episodes()["iteration"].to_pylist())
    assert (run[1].rollouts(1).rewards == storage.open_run(parent)[1].rollouts(1).rewards).all()
    assert run[2].learner().params.keys() == storage.open_run(parent)[2].learner().params.keys()
    assert storage.verify_run(made.path) == []
    assert storage.verify_run(parent) == []
    assert run_digests(parent) == before


def test_a_fork_leaves_no_file_open(make_run, fork):
    parent = make_run(2)
    before = [*Path("/proc/self/fd").iterdir()]
    fork(parent, 1)
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_a_fork_copies_no_arrays_and_says_so(make_run, fork):
    parent = make_run(2)
    made = fork(parent, 2)
    assert (made.copied_files, made.copied_bytes) == (0, 0)
    chunks = [file for file in (parent / "data.zarr").rglob("c.*") if file.is_file()]
    assert len(chunks) > 20
    for chunk in chunks:
        assert chunk.samefile(made.path / chunk.relative_to(parent))
    shared = [file.stat() for file in made.path.rglob("*") if file.is_file() and file.stat().st_nlink > 1]
    assert (made.shared_files, made.shared_bytes) == (len(shared), sum(status.st_size for status in shared))


def test_a_fork_that_begins_behind_a_segment_shares_its_files(make_run, fork):
    parent, told = make_run(3), []
    with storage.open_writer(parent) as writer:
        assert writer.pack() == [range(2)]
    made, files = fork(parent, 2).path, [file for file in parent.glob("_segments/**/*.*") if file.is_file()]
    assert len(files) > 20
    assert all(file.samefile(made / file.relative_to(parent)) for file in files)
    fork(parent, 3, "later", progress=lambda *numbers: told.append(numbers))
    assert told == [(0, 22), *((15 + n, 22) for n in range(7))]  # a segment of 15 outputs, and 7 others


def test_a_fork_that_another_process_is_making_is_left_to_it(make_run, fork, tmp_path):
    parent, workshop = make_run(1), tmp_path / ".metaloom-fork-fork"
    (workshop / "run").mkdir(parents=True)
    lock = acquire_lock(workshop / "writer.lock", "0" * 16, take_over=False)
    with pytest.raises(storage.RunLocked, match=rf"process {os.getpid()} on .* has been writing it"):
        fork(parent, 1)
    assert lock.is_held()
    assert (workshop / "run").is_dir()
    lock.release()
    assert fork(parent, 1).iteration == 1


def test_where_files_cannot_be_shared_they_are_copied_and_counted(make_run, fork, monkeypatch):
    parent = make_run(2)
    link, linked = os.link, fork(parent, 2, "linked")

    def refuse(source, target, **options):
        if str(source).startswith(str(parent)):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", refuse)
    made = fork(parent, 2)
    assert (made.shared_files, made.shared_bytes) == (0, 0)
    assert (made.copied_files, made.copied_bytes) == (linked.shared_files, linked.shared_bytes)
    assert storage.verify_run(made.path) == []
    assert not (parent / "run.json").samefile(made.path / "run.json")


def test_run_json_names_the_parent_and_what_was_changed(make_run, fork):
    parent = make_run(3)
    run = storage.open_run(fork(parent, 2).path)
    original = storage.open_run(parent)
    assert run.info["parent"] == {
        "id": original.info["id"],
        "name": "run",
        "iteration": 2,
        "learner": original.record(StageRef(1, "meta_optimize")).digest,
        "newest_record": original.record(StageRef(1, "meta_optimize")).sha256,
        "changes": {"lr": [None, 0.5]},
    }
    assert run.info["id"] != original.info["id"]
    assert run.config_of(StageRef(1, "adapt")) == original.config
    assert run.config == CONFIG["config"]


def test_a_fork_stays_whole_when_its_parent_is_deleted(make_run, fork, go_on, run_digests):
    parent = make_run(2)
    made = fork(parent, 2)
    expected = run_digests(made.path)
    shutil.rmtree(parent)
    assert storage.verify_run(made.path) == []
    assert run_digests(made.path) == expected
    go_on(made.path, 2)
    assert len(storage.open_run(made.path).iterations) == 3


def test_a_fork_stays_whole_when_its_parent_is_thinned_and_the_other_way_round(make_run, fork):
    parent = make_run(3)
    made = fork(parent, 3)
    with storage.open_writer(parent) as writer:
        writer.thin([0, 1])
    run = storage.open_run(made.path)
    assert run.thinned_iterations() == []
    assert run[0].rollouts(0).num_steps > 0
    with storage.open_writer(made.path) as writer:
        writer.thin([2])
    assert storage.open_run(parent)[2].samples(1).mask.any()
    for path in (parent, made.path):
        assert storage.verify_run(path) == []


def test_a_fork_of_a_fork_carries_the_whole_history(make_run, fork, go_on, run_digests):
    parent = make_run(2)
    child = fork(parent, 1, "child").path
    go_on(child, 1, 2)
    grandchild = fork(child, 2, "grandchild", config_digest="ghi").path
    go_on(grandchild, 2, seed=9)
    assert storage.verify_run(grandchild) == []
    run = storage.open_run(grandchild)
    assert [ancestor["first_sequence"] for ancestor in run.info["ancestors"]] == [0, 8]
    assert {run.record(ref).config_digest for ref in run.refs()} == {"abc", "def", "ghi"}
    shared = {ref: digest for ref, digest in run_digests(child).items() if ref.iteration < 2}
    assert shared.items() <= run_digests(grandchild).items()
    twin = fork(child, 1, "twin").path  # which begins where its parent does
    go_on(twin, 1)
    assert storage.verify_run(twin) == []
    assert storage.open_run(twin).iterations == range(2)
    shutil.rmtree(parent)
    shutil.rmtree(child)
    assert storage.verify_run(grandchild) == []


def test_a_fork_before_the_first_iteration_has_the_parents_initial_learner(make_run, fork, go_on):
    parent = make_run(1)
    made = fork(parent, 0)
    run = storage.open_run(made.path)
    assert run.refs() == [StageRef(0, "initialize")]
    assert [run.config_of(StageRef(0, stage)) for stage in ("initialize", "sample_tasks")] == [{"seed": 1}, run.config]
    go_on(made.path, 0)
    assert storage.verify_run(made.path) == []
    assert len(run.iterations) == 1
    first = storage.open_run(parent)[0].learner().params
    assert all(np.array_equal(run[0].learner().params[name], first[name]) for name in first)


def test_a_fork_takes_over_what_its_parent_had_thinned_as_thinned(make_run, fork):
    parent = make_run(3)
    record = storage.open_run(parent).record(StageRef(0, "collect_rollouts"))
    removed = next(chunk.path for chunk in record.chunks if chunk.size)
    with storage.open_writer(parent) as writer:
        writer.thin([0, 2])
    (parent / removed).write_bytes(b"left by thinning that was killed")
    made = fork(parent, 2)
    assert not (made.path / removed).exists()
    run = storage.open_run(made.path)
    assert run.thinned_iterations() == [0]
    with pytest.raises(storage.StageThinned, match="fork@0 --materialise"):
        run[0].rollouts(0)
    assert run[1].rollouts(0).num_steps > 0
    assert storage.verify_run(made.path) == []


@pytest.mark.parametrize("order", [("thin", "pack"), ("pack", "thin")])
def test_a_fork_that_begins_in_a_segment_takes_over_only_what_was_thinned_before_it(make_run, fork, order):
    parent = make_run(4)
    with storage.open_writer(parent) as writer:
        for act in order:
            writer.thin([1, 2]) if act == "thin" else writer.pack()
    made = fork(parent, 2)
    assert storage.open_run(parent).thinned_iterations() == [1, 2]
    assert storage.open_run(made.path).thinned_iterations() == [1]
    assert storage.verify_run(made.path) == []


def test_a_parent_that_is_thinned_while_it_is_forked_gives_a_whole_fork(make_run, fork, monkeypatch):
    parent = make_run(3)
    share, count = forking._Sharing._share, iter(range(10**6))

    def thin_in_between(links, name, new_name=None):
        if next(count) == 60:
            with storage.open_writer(parent) as writer:
                writer.thin([0, 1, 2])
        share(links, name, new_name)

    monkeypatch.setattr(forking._Sharing, "_share", thin_in_between)
    made = fork(parent, 3)
    assert next(count) > 100
    assert storage.verify_run(made.path) == []
    run = storage.open_run(made.path)
    assert 0 < len(run.thinned_iterations()) <= 3
    storage.open_writer(made.path).close()
    assert storage.verify_run(made.path) == []


def test_a_run_whose_history_has_gaps_can_be_forked(make_run, fork, go_on, make_batches, put):
    parent = make_run(3)
    (parent / "_commits" / StageRef(0, "adapt").file_name).unlink()
    with storage.open_writer(parent) as writer:
        put(writer, [output for output in make_batches().iteration(0) if not writer.contains(output[0])])
    assert storage.verify_run(parent) == []
    made = fork(parent, 1)
    assert storage.verify_run(made.path) == []
    go_on(made.path, 1)
    assert storage.verify_run(made.path) == []


def test_a_session_that_is_closed_while_it_is_forked_comes_along(make_run, fork, monkeypatch):
    parent, read = make_run(2), forking.read_session
    writer = storage.open_writer(parent)

    def meanwhile(folder):
        found = read(folder)
        writer.close()
        return found

    monkeypatch.setattr(forking, "read_session", meanwhile)
    made = fork(parent, 2)
    theirs, own = ({file.parent.name for file in path.glob("_sessions/*/session.json")} for path in (parent, made.path))
    assert theirs < own
    assert len(theirs) == 2


def test_a_run_can_be_forked_while_it_is_written(make_run, fork, put, batches):
    parent = make_run(2, capacity=3)
    with storage.open_writer(parent) as writer:
        put(writer, batches.iteration(2)[:3])
        made = fork(parent, 2)
        put(writer, batches.iteration(2)[3:])
    assert storage.verify_run(made.path) == []
    assert storage.verify_run(parent) == []


def test_a_record_of_one_fork_is_foreign_in_another(make_run, fork, go_on):
    parent = make_run(2)
    paths = [fork(parent, 1, name).path for name in ("one", "two")]
    for seed, path in enumerate(paths):
        go_on(path, 1, seed=seed)
    name = StageRef(1, "sample_tasks").file_name
    shutil.copyfile(paths[0] / "_commits" / name, paths[1] / "_commits" / name)
    damage = [d for d in storage.verify_run(paths[1]) if d.file == f"_commits/{name}"]
    assert "does not follow the record before it" in {d.problem for d in damage}


@pytest.mark.parametrize(
    ("iteration", "name", "error"),
    [(3, "fork", storage.StageMissing), (1, "run", storage.RunExists), (1, "taken", storage.RunExists)],
)
def test_an_iteration_that_is_not_there_or_a_path_that_is_taken_is_refused(
    make_run, fork, tmp_path, iteration, name, error
):
    parent = make_run(2)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error):
        fork(parent, iteration, name)
    assert sorted(tmp_path.rglob("*")) == before


FORKER = """
import os, signal, sys
from metaloom import storage

count, stop = 0, int(sys.argv[3])

def counted(call):
    def wrapper(*arguments, **options):
        global count
        if count == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return call(*arguments, **options)
    return wrapper

for name in ("link", "replace", "rename", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
about = {"config": {}, "config_digest": "d", "environment": {}}
storage.fork_run(storage.open_run(sys.argv[1]), 1, sys.argv[2], capacity=2, **about)
print(count)
"""


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_fork_killed_at_any_write_leaves_no_run_and_can_be_made_again(make_run, tmp_path):
    parent = make_run(1, B=1, E=1, T=2)
    target = tmp_path / "fork"

    def attempt(stop):
        arguments = [sys.executable, "-c", FORKER, str(parent), str(target), str(stop)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=300)

    writes = int(attempt(-1).stdout)
    shutil.rmtree(target)
    for stop in sorted({0, 1, 5, writes // 2, writes - 3, writes - 2, writes - 1}):
        assert attempt(stop).returncode == -signal.SIGKILL
        whole = target.exists()
        assert not whole or storage.verify_run(target) == []
        runs = [folder.name for folder in tmp_path.iterdir() if (folder / "run.json").exists()]
        assert sorted(runs) == (["fork", "run"] if whole else ["run"])
        assert storage.verify_run(parent) == []
    assert attempt(-1).returncode == 0
    assert storage.verify_run(target) == []
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["fork", "run"]


def test_a_fork_with_room_for_less_than_it_begins_with_is_refused(make_run, fork, tmp_path):
    parent = make_run(2)
    for iteration, capacity in ((2, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"capacity is {capacity}; the fork begins with {iteration} iterations"):
            fork(parent, iteration, capacity=capacity)
    assert not (tmp_path / "fork").exists()
    assert fork(parent, 2, capacity=2).iteration == 2


def test_a_parent_that_lacks_a_file_is_not_forked(make_run, fork, tmp_path):
    parent = make_run(2)
    (parent / "data.zarr/tasks/params/c.0.0.0").unlink()
    with pytest.raises(storage.DamagedRun, match=r"run/data\.zarr/tasks/params/c\.0\.0\.0: missing"):
        fork(parent, 1)
    assert not (tmp_path / "fork").exists()


@pytest.mark.parametrize("call", ["link", "rename"])
def test_a_disk_that_fails_while_a_fork_is_made_is_named_and_leaves_no_fork(
    make_run, fork, tmp_path, monkeypatch, call
):
    parent, real = make_run(1), getattr(os, call)

    def fail(source, target, **options):
        if not (Path(target) == tmp_path / "fork" if call == "rename" else parent in Path(source).parents):
            return real(source, target, **options)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(storage.StorageFailed, match="Input/output error"):
        fork(parent, 1)
    assert not (tmp_path / "fork").exists()


def test_what_appears_at_the_path_while_a_fork_is_made_stays(make_run, fork, tmp_path, monkeypatch):
    parent, place = make_run(1), forking._place

    def late(folder, path):
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
        place(folder, path)

    monkeypatch.setattr(forking, "_place", late)
    with pytest.raises(storage.RunExists, match="fork: the path was created in the meantime"):
        fork(parent, 1)
    assert [file.name for file in (tmp_path / "fork").iterdir()] == ["thesis.txt"]
