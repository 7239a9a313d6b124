"""A power cut while runs are created, packed, thinned, repaired, forked and removed, and after each of these."""

import errno
import itertools
import os
import shutil

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef
from metaloom.storage.format.files import replace_file
from metaloom.storage.format.thinning import packed_marker_path, render_packed_marker
from metaloom.storage.keep.removal import finish_removals, remove_run, unfinished_removals
from metaloom.storage.remote.entries import Entry
from metaloom.storage.remote.log import RemoteLog
from metaloom.storage.write import packer

CREATION = {"config": {}, "config_digest": "", "environment": {}, "capacity": 6}
APPEARS = ("run.json", "fork", "late", "run", "00000002-00000003", "000001.claim")
"""Names by which a run, a segment or a session begins to count, or a run ceases to."""
STEPS = 40
"""Rows of a task's parameters, which make them large enough to keep files of their own in a segment."""


@pytest.fixture(scope="module")
def power_loss(load_module):
    return load_module("power_loss")


@pytest.fixture(autouse=True)
def _few_large_arrays(monkeypatch):
    monkeypatch.setattr(packer, "COMPRESS_FROM", 4 * STEPS)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def outputs(iterations):
    yield StageRef(0, "initialize"), Update(LearnerState({"w": np.zeros(3, np.float32)}), {})
    for i in range(iterations):
        yield StageRef(i, "sample_tasks"), TaskBatch(np.full((2, 1), float(i)), np.array([-1, -1]), ("x",), ("m",))
        yield StageRef(i, "adapt"), TaskParams({"w": np.full((2, STEPS), i, np.float32)})
        yield StageRef(i, "meta_optimize"), Update(LearnerState({"w": np.full(3, i, np.float32)}), {"loss": float(i)})


def put_missing(writer, iterations):
    for ref, value in outputs(iterations):
        if not writer.contains(ref):
            writer.put(ref, value, inputs=[], seed_position=[], started=0.0, seconds=0.0)


def complete(path, iterations, **options):
    """Creates a run or goes on with it."""
    there = (path / "run.json").exists()
    with storage.open_writer(path, **options) if there else storage.create_run(path, **CREATION) as writer:
        put_missing(writer, iterations)


def read(path):
    """What a run holds, as `whole` says it."""
    run = storage.open_run(path)
    return {ref: run.record(ref).digest for ref in run.refs()}


def whole(iterations):
    return {ref: storage.output_digest(storage.digest(value)) for ref, value in outputs(iterations)}


def sound(path, iterations, thinned=()):
    """Asserts that a run is whole, has these iterations, and lacks the arrays of these alone."""
    assert storage.verify_run(path) == []
    assert read(path) == whole(iterations)
    assert storage.open_run(path).thinned_iterations() == [*thinned]


def pack(path):
    with storage.open_writer(path) as writer:
        return writer.pack()


def thin(path, iterations):
    with storage.open_writer(path) as writer:
        writer.thin(iterations)


def restore(path, iterations):
    values = dict(outputs(6))
    with storage.open_writer(path) as writer:
        for i in iterations:
            writer.restore({StageRef(i, "adapt"): values[StageRef(i, "adapt")]})


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture
def base(tmp_path):
    """A folder with a run of five iterations: 0 and 1 in a segment, 0 and 2 thinned, the first before it was packed."""
    path = tmp_path / "base" / "run"
    complete(path, 3)
    thin(path, [0])
    assert pack(path) == [range(2)]
    complete(path, 5)
    thin(path, [2])
    return path.parent


@pytest.fixture(params=["sampled", pytest.param("all", marks=[pytest.mark.sweep, pytest.mark.timeout(0)])])
def cut_power(request, tmp_path, power_loss, write_points):
    """Acts in a folder, and checks with `holds(folder, ended)` what is left of it by a power cut at any moment.

    A sample is the end, where nothing more may be lost, and moments at which most is at stake: before a sync, and when
    a run or a segment appears.
    """

    def check(root, act, holds, disk=None, moments=2):
        if disk is None:
            disk = power_loss.Disk(root)
            disk.load()
        begin, seen = len(disk.operations), set()
        with disk.recording(write_points):
            act(root)
        end = len(disk.operations)
        assert end > begin
        if request.param == "all":
            chosen = range(begin, end + 1)
        else:
            syncs = [n for n in range(begin, end) if isinstance(disk.operations[n], power_loss.Sync)]
            named = [
                n + 1
                for n in range(begin, end)
                if isinstance(op := disk.operations[n], power_loss.Names)
                and any(name in APPEARS for _, name, _ in op.entries)
            ]
            chosen = [*syncs[:: len(syncs) // moments + 1], *syncs[-4:], *named, end]
        for length, adversary in itertools.product(chosen, power_loss.ADVERSARIES):
            content = disk.after_power_cut(length, adversary)
            if (state := (length == end, hash(tuple(content.items())))) in seen:
                continue
            seen.add(state)
            folder = tmp_path / "after"
            power_loss.build(content, folder)
            try:
                holds(folder, length == end)
            except Exception as error:
                error.add_note(f"after {length - begin} of {end - begin} operations, {adversary}: {content.keys()}")
                raise
            shutil.rmtree(folder)
        return disk

    return check


def created(name):
    """What creates a run, or goes on with it, and what has to hold about it."""

    def act(root):
        complete(root / name, 2)

    def holds(folder, ended):
        path = folder / name
        if ended:
            sound(path, 2)
        elif (path / "run.json").exists():
            assert storage.verify_run(path) == []
            assert read(path).items() <= whole(2).items()
        complete(path, 2)
        sound(path, 2)

    return act, holds


def test_a_run_in_new_folders_is_created(tmp_path, cut_power):
    (tmp_path / "root").mkdir()
    cut_power(tmp_path / "root", *created("some/runs/run"))


def test_a_run_continues_whose_writer_was_killed_after_making_a_folder(
    tmp_path, power_loss, write_points, cut_power, request
):
    (tmp_path / "root").mkdir()
    disk, (act, holds) = power_loss.Disk(tmp_path / "root"), created("run")
    with disk.recording(write_points):
        act(disk.root)
    made = [
        n + 1
        for n, op in enumerate(disk.operations)
        if isinstance(op, power_loss.Names) and any(inode in disk.folders for _, _, inode in op.entries)
    ]
    assert len(made) > 10
    for kill in made[:: 1 if request.node.callspec.params["cut_power"] == "all" else 4]:
        left = disk.killed(kill, tmp_path / f"killed at {kill}")
        cut_power(left.root, act, holds, left, moments=1)


def test_a_run_is_packed(base, cut_power):
    def holds(folder, ended):
        path = folder / "run"
        sound(path, 5, [0, 2])
        assert not ended or {p.name for p in path.glob("_segments/*")} == {"00000000-00000001", "00000002-00000003"}
        pack(path)
        sound(path, 5, [0, 2])
        assert not [*path.glob("_commits/0000000[0-3].*")]
        assert not [*path.glob("data.zarr/adapted_0/params.float32/c.[0-3].*")]
        assert not [*path.glob("tables/*/0000000[0-3].*")]

    cut_power(base, lambda root: pack(root / "run"), holds)


def test_markers_of_packed_iterations_are_joined(base, cut_power):
    thin(base / "run", [1])

    def holds(folder, ended):
        sound(folder / "run", 5, [0, 1, 2])
        pack(folder / "run")
        sound(folder / "run", 5, [0, 1, 2])
        restore(folder / "run", [0, 1, 2])
        sound(folder / "run", 5)

    cut_power(base, lambda root: pack(root / "run"), holds)


def test_a_run_is_packed_where_a_marker_of_an_earlier_segment_is_left(base, cut_power):
    restore(base / "run", [2])
    marker = packed_marker_path(base / "run", range(2, 4))
    record = storage.open_run(base / "run").record(StageRef(2, "adapt"))
    marker.write_bytes(render_packed_marker(range(2, 4), {2: {record.ref: record.sha256}}))

    def holds(folder, ended):
        sound(folder / "run", 5, [0])

    cut_power(base, lambda root: pack(root / "run"), holds)


def test_iterations_are_thinned(base, cut_power):
    def holds(folder, ended):
        path = folder / "run"
        assert storage.verify_run(path) == []
        thinned = storage.open_run(path).thinned_iterations()
        assert {0, 2} <= {*thinned} <= {0, 1, 2, 3}
        assert not ended or thinned == [0, 1, 2, 3]
        storage.open_writer(path).close()
        sound(path, 5, thinned)
        assert not [p for i in thinned for p in path.glob(f"data.zarr/adapted_0/params.float32/c.{i}.*")]

    cut_power(base, lambda root: thin(root / "run", [1, 3]), holds)


def test_thinned_iterations_come_back(base, cut_power):
    def holds(folder, ended):
        assert storage.verify_run(folder / "run") == []
        thinned = storage.open_run(folder / "run").thinned_iterations()
        assert {*thinned} <= {0, 2}
        assert not ended or thinned == []
        restore(folder / "run", thinned)
        sound(folder / "run", 5)

    cut_power(base, lambda root: restore(root / "run", [0, 2]), holds)


@pytest.mark.parametrize("file", ["data.zarr/tasks/params/c.0.0.0", "seal.json", "tables/metrics.parquet"])
def test_a_damaged_segment_is_taken_apart_and_computed_again(base, cut_power, file):
    (found,) = (base / "run/_segments/00000000-00000001").glob(file)
    flip(found)

    def holds(folder, ended):
        path = folder / "run"
        if not ended:
            complete(path, 5, repair=True)
        assert storage.verify_run(path) == []
        assert read(path) == whole(5)
        restore(path, storage.open_run(path).thinned_iterations())
        pack(path)
        sound(path, 5)

    cut_power(base, lambda root: complete(root / "run", 5, repair=True), holds)


def test_a_damaged_output_is_taken_out(base, cut_power):
    (found,) = (base / "run").glob("data.zarr/adapted_0/params.float32/c.3.*")
    flip(found)

    def holds(folder, ended):
        path = folder / "run"
        assert not ended or not storage.open_run(path).contains(StageRef(3, "adapt"))
        complete(path, 5, repair=not ended)
        sound(path, 5, [0, 2])

    cut_power(base, lambda root: storage.open_writer(root / "run", repair=True).close(), holds)


def fork(root):
    parent = storage.open_run(root / "run")
    storage.fork_run(parent, 1, root / "some" / "fork", **CREATION)
    storage.fork_run(parent, 4, root / "late", **CREATION)


@pytest.mark.parametrize("way", ["linked", "copied"])
def test_a_run_is_forked(base, cut_power, monkeypatch, way):
    def refuse(source, target, **options):
        if options:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return link(source, target)

    link = os.link
    if way == "copied":
        monkeypatch.setattr(os, "link", refuse)

    def holds(folder, ended):
        sound(folder / "run", 5, [0, 2])
        for path, iterations, thinned in ((folder / "some" / "fork", 1, [0]), (folder / "late", 4, [0, 2])):
            if path.exists() or ended:
                sound(path, iterations, thinned)
                complete(path, 5)
                sound(path, 5, thinned)
        if not ended and not (folder / "late").exists():
            shutil.rmtree(folder / "some", ignore_errors=True)
            fork(folder)

    cut_power(base, fork, holds)


def test_a_run_is_removed(base, cut_power):
    def holds(folder, ended):
        if (folder / "run").exists():
            assert not ended
            sound(folder / "run", 5, [0, 2])
        [*finish_removals(folder)]
        assert unfinished_removals(folder) == []

    cut_power(base, lambda root: remove_run(root / "run"), holds)


def test_a_batch_that_a_stage_failed_with_is_put_aside(base, cut_power):
    def act(root):
        ref, arrays = StageRef(4, "adapt"), {"w": np.ones((2, 3))}
        storage.put_in_quarantine(root / "run", ref, message="NaN", about={}, arrays=arrays)

    def holds(folder, ended):
        sound(folder / "run", 5, [0, 2])
        storage.read_quarantine(folder / "run")

    cut_power(base, act, holds)


def test_a_list_of_references_or_a_sweep_is_replaced(tmp_path, cut_power):
    root = tmp_path / "root"
    root.mkdir()
    (root / "index.json").write_bytes(b"old")

    def holds(folder, ended):
        assert (folder / "index.json").read_bytes() in ([b"new"] if ended else [b"old", b"new"])

    cut_power(root, lambda root: replace_file(root / "index.json", b"new", root / ".part"), holds)


def test_a_file_of_the_cache_of_a_url_appears_whole(tmp_path, cut_power):
    root = tmp_path / "root"
    (root / "beside").mkdir(parents=True)

    def holds(folder, ended):
        assert {path.read_bytes() for path in folder.glob("run/tables/*")} <= {b"content"}

    def act(root):
        RemoteLog(root / "run", "s3://bucket/run", root / "beside").write("tables/0.parquet", b"content")

    cut_power(root, act, holds)


def test_the_log_of_a_url_notes_a_session_before_it_stores_anything_and_keeps_whole_entries(tmp_path, cut_power):
    root, entry = tmp_path / "root", Entry(0, "", "begin", "0" * 16)
    (root / "beside").mkdir(parents=True)

    def act(root):
        log = RemoteLog(root, "s3://bucket/run", root / "beside")
        log.claim("session")
        log.append(entry, entry.content())

    def holds(folder, ended):
        for name, content in (("sessions", b"session\n"), ("entries", entry.content())):
            path = folder / "beside" / name
            assert not ended or not path.exists() or path.read_bytes() == content

    cut_power(root, act, holds)
