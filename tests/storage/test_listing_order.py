"""What a store does depends on what is in its folders, and not on the order in which a file system lists that."""

import json
import os
import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.sessions import newest_session
from metaloom.storage.keep.removal import unfinished_removals


class Entries:
    """The entries of a folder in another order, as `os.scandir` gives them."""

    def __init__(self, entries):
        self._entries = iter(entries)

    def __iter__(self):
        return self._entries

    def __next__(self):
        return next(self._entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def close(self):
        pass


@contextmanager
def listed(monkeypatch, *, descending):
    """Lists every folder by name, from one end or from the other."""
    listdir, scandir = os.listdir, os.scandir

    def entries(path="."):
        with scandir(path) as found:
            return Entries(sorted(found, key=lambda entry: entry.name, reverse=descending))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path=".": sorted(listdir(path), reverse=descending))
        patch.setattr(os, "scandir", entries)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory, make_batches, creation, put):
    """Three sessions: two iterations in a segment, two outside, of which two were thinned; two faults, two runs."""
    path, batches = tmp_path_factory.mktemp("base") / "b", make_batches()
    iterations = [batches.iteration(i) for i in range(4)]
    with storage.create_run(path, capacity=4, **creation) as writer:
        put(writer, [*iterations[0], *iterations[1]])
    with storage.open_writer(path) as writer:
        writer.describe({"session": 1})
        put(writer, iterations[2])
        writer.thin([0, 2])
        assert writer.pack() == [range(2)]
    with storage.open_writer(path) as writer:
        writer.describe({"session": 2})
        put(writer, iterations[3])
    for ref in (StageRef(1, "adapt"), StageRef(0, "meta_optimize")):
        storage.put_in_quarantine(path, ref, message="NaN", about={}, arrays={"x": np.ones(3)})
    return path.parent


def read(folder):
    run = storage.open_run(folder / "b")
    tables = [table.to_pylist() for table in (run.episodes(), run.tasks(), run.metrics())]
    faults = [fault.ref for fault in storage.read_quarantine(run.path)]
    found = run.refs(), run.iterations, run.thinned_iterations(), tables, faults, storage.verify_run(run.path)
    assert faults == [StageRef(0, "meta_optimize"), StageRef(1, "adapt")]
    assert [session.number for session in run.sessions()] == [0, 1, 2]
    assert newest_session(run.path, 0).head == newest_session(run.path, 2).head
    return found


def lose_the_newest_record(folder):
    (folder / "b/_commits" / StageRef(3, "meta_optimize").file_name).unlink()
    damage = [(item.file, item.problem) for item in storage.verify_run(folder / "b")]
    assert [file for file, _ in damage] == ["_commits"]
    with storage.open_writer(folder / "b") as writer:
        assert not writer.contains(StageRef(3, "meta_optimize"))
    return damage


def pack(folder):
    with storage.open_writer(folder / "b") as writer:
        writer.pack()
    for seal in folder.glob("b/_segments/*/seal.json"):
        outputs = [(output["stage"], output["step"]) for output in json.loads(seal.read_bytes())["outputs"]]
        assert outputs == sorted(outputs)
    files = [*folder.glob("b/_segments/**/*.*"), *folder.glob("b/_thinned/*")]
    return {file.relative_to(folder): file.read_bytes() for file in files if file.is_file()}


def fork(folder):
    parent = storage.open_run(folder / "b")
    options = {"config": {}, "config_digest": "", "environment": {}, "capacity": 4}
    made = storage.fork_run(parent, 3, folder / "fork", **options)
    run = storage.open_run(made.path)
    return run.refs(), run.thinned_iterations(), [run.record(ref).sequence for ref in run.refs()], made.shared_files


def repair(folder):
    path = folder / "b"
    with storage.open_writer(path) as writer:
        writer.thin([3])
    for _ in range(3):
        storage.open_writer(path).close()
    for pattern in ("run.json", "_sessions/*.closed/session.json", "_thinned/0000000[23].json"):
        for damaged in path.glob(pattern):
            os.truncate(damaged, 9)
    with storage.open_writer(path, repair=True) as writer:
        repaired = list(writer.repaired)
    numbers = [line[10:16] for line in repaired if line.startswith("_sessions/")]
    assert numbers == [f"{number:06d}" for number in range(7)]
    markers = [line[:17] for line in repaired if line.startswith("_thinned/")]
    assert markers == ["_thinned/00000002", "_thinned/00000003"]
    assert storage.verify_run(path) == []
    return [re.sub("-[0-9a-f]{16}", "", line) for line in repaired]


def list_runs(folder):
    for name, when in (("a", 2), ("c", 1)):
        shutil.copytree(folder / "b", folder / name)
        os.utime(folder / name / "run.json", (when, when))
    for name in ("y", "x"):
        (folder / ".metaloom-removed" / name).mkdir(parents=True)
    assert [path.name for path in storage.find_runs(folder)] == ["b", "a", "c"]
    assert [path.name for path in unfinished_removals(folder)] == ["x", "y"]


@pytest.mark.parametrize("act", [read, lose_the_newest_record, pack, fork, repair, list_runs])
def test_the_order_in_which_names_are_listed_changes_nothing(base, tmp_path, monkeypatch, act):
    found = []
    for descending in (False, True):
        folder = tmp_path / "copy"
        shutil.copytree(base, folder)
        with listed(monkeypatch, descending=descending):
            found.append(act(folder))
        shutil.rmtree(folder)
    assert found[0] == found[1]
