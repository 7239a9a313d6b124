"""Packing under object storage: one entry of the log, whoever dies, reads, thins, forks or damages what (T31).

Two tests ask a real S3 server process. The others ask fsspec's store in memory, whose conditional puts are enough for
what this process does alone, and which answers a hundred times as fast.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import xarray as xr
from fsspec.implementations.memory import MemoryFileSystem

from metaloom import storage
from metaloom.flows import cli
from metaloom.storage import StageRef
from metaloom.storage.remote import entries
from metaloom.storage.remote.log import RemoteLog
from metaloom.storage.remote.objects import ObjectFolder
from metaloom.storage.write import packer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("warm"),
    # botocore's own, of what its next version will ask for.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore"),
]

CREATION = {"config": {"seed": 1}, "config_digest": "abc", "environment": {"code": "none"}}
URL = "memory://bucket/runs/first"
ON_A_SERVER = "s3://bucket/runs/first"
ITERATIONS = 4
LONG = 2100
"""Steps of an episode whose observations are too large to be copied into a segment."""
KILLED_PACKER = """
import os, signal, sys
from metaloom import storage
from metaloom.storage.remote.objects import ObjectFolder

count = 0

def until_killed(request):
    def counted(self, *arguments):
        global count
        count += 1
        if count == int(sys.argv[1]) and sys.argv[2] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = request(self, *arguments)
        if count == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    return counted

with storage.open_writer(sys.argv[3]) as writer:
    for name in ("put_all", "put_new", "remove"):
        setattr(ObjectFolder, name, until_killed(getattr(ObjectFolder, name)))
    writer.pack()
"""


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """An empty store in memory, with an empty cache."""
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("METALOOM_RUNS", URL.rpartition("/")[0])
    monkeypatch.chdir(tmp_path)
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


def create(url, make_batches, put):
    """A run of large and small arrays."""
    batches = make_batches(T=LONG)
    with storage.create_run(url, capacity=ITERATIONS + 1, **CREATION) as writer:
        for i in range(ITERATIONS):
            put(writer, batches.iteration(i, rounds=1))


@pytest.fixture
def run(memory, make_batches, put):
    """What a run in memory holds."""
    create(URL, make_batches, put)
    return read()


def read(url=URL):
    """All that a run holds, as comparable data."""
    run = storage.open_run(url)
    refs = [ref for ref in run.refs() if not run.is_thinned(ref)]
    found = {str(ref): storage.output_digest(storage.digest(run.load(ref))) for ref in refs}
    return found | {table.__name__: table().to_pydict() for table in (run.episodes, run.tasks, run.metrics)}


def objects(fs):
    return fs.find("/bucket/runs/first/_objects")


def used():
    """The objects that the log names."""
    return {f"/bucket/runs/first/{file.key}" for file in log().files.values() if file.key}


def log(url=URL):
    found = RemoteLog.of(storage.folder_of(url))
    assert found is not None
    found.pull()
    return found


def schema(raw):
    return entries.parse_sealed(raw)["schema"]


def pack(url=URL, *, take_over=False):
    with storage.open_writer(url, take_over=take_over) as writer:
        return writer.pack()


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.sweep)])
def test_a_packing_killed_around_its_entry_loses_nothing_and_is_done_by_the_next_with_fewer_objects(
    bucket, make_batches, put, other_machine, capsys, moment
):
    create(ON_A_SERVER, make_batches, put)
    run, before = read(ON_A_SERVER), len(bucket.find("bucket/runs/first/_objects"))
    child = [sys.executable, "-c", KILLED_PACKER, "2", moment, ON_A_SERVER]
    assert subprocess.run(child, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    assert [*storage.folder_of(ON_A_SERVER).glob("_segments/*")]
    assert read(ON_A_SERVER) == run
    # The entry is what counts: before it nothing is packed, whatever the cache of the killed process has.
    assert cli.run(["pack", "first"]) == 0
    done = "packed 3 iterations into 1 segment" if moment == "before" else "nothing to pack"
    assert done in capsys.readouterr().out
    seal = storage.open_run(ON_A_SERVER).files.segments.all()[0].seal
    small = [array.rows - 1 for array in seal.arrays.values() if array.sharded]
    assert 0 < len(small) < len(seal.arrays)
    # One object for each small array and each of the three tables, and one more for the records.
    assert before - len(bucket.find("bucket/runs/first/_objects")) == sum(small) + 3 * 2 - 1
    assert read(ON_A_SERVER) == run
    other_machine("second")
    assert read(ON_A_SERVER) == run
    assert storage.verify_run(ON_A_SERVER) == []


def test_a_plain_reader_reads_the_folder_that_verification_fetched(run, other_machine):
    expected = [storage.open_run(URL)[i].rollouts(0).observations for i in range(3)]
    pack()
    other_machine("second")
    storage.verify_run(URL)
    (segment,) = storage.folder_of(URL).glob("_segments/*")
    found = xr.open_zarr(segment / "data.zarr", group="rollouts_0", consolidated=False)
    assert np.array_equal(found["observations"].values, np.stack(expected))


def test_packing_on_a_machine_with_an_empty_cache_fetches_what_is_copied_and_no_more(run, other_machine):
    other_machine("second")
    assert pack() == [range(3)]
    assert not [*storage.folder_of(URL).rglob("observations/c.*")]
    assert read() == run
    other_machine("third")
    assert read() == run


def test_a_reader_that_opened_the_run_before_reads_on_while_another_machine_packs(run, other_machine):
    other_machine("second")
    reader = storage.open_run(URL)
    rewards = reader[1].rollouts(0).rewards
    other_machine("third")
    pack()
    other_machine("second")
    assert np.array_equal(reader[1].rollouts(0).rewards, rewards)
    assert (
        storage.output_digest(storage.digest(reader.load(StageRef(0, "process_samples"))))
        == run[str(StageRef(0, "process_samples"))]
    )
    # Of the copies in the cache, what was copied into the segment is gone, and what was moved is not fetched again.
    folder = storage.folder_of(URL)
    assert [*folder.glob("data.zarr/rollouts_0/rewards/c.1.*")] == []
    assert len([*folder.glob("_segments/*/data.zarr/rollouts_0/observations/c.*")]) == 1
    assert reader.episodes().to_pydict() == run["episodes"]
    assert read() == run


def test_training_packs_old_iterations_under_a_url_too(memory, make_batches, put, other_machine, monkeypatch):
    monkeypatch.setattr(packer, "SIZE", 2)
    monkeypatch.setattr(packer, "MARGIN", 1)
    batches = make_batches()
    with storage.create_run(URL, capacity=6, **CREATION) as writer:
        for i in range(6):
            put(writer, batches.iteration(i, rounds=1))
    expected = read()
    other_machine("second")
    assert read() == expected
    assert [s.iterations for s in storage.open_run(URL).files.segments.all()] == [range(2), range(2, 4)]
    assert storage.verify_run(URL) == []


class _Cut:
    """Requests that change the store, the first of which are answered."""

    def __init__(self, monkeypatch, answered):
        self.left = answered
        for name in ("put_all", "put_new", "remove"):
            monkeypatch.setattr(ObjectFolder, name, self._counted(getattr(ObjectFolder, name)))

    def _counted(self, request):
        def counted(*arguments):
            self.left -= 1
            if self.left < 0:
                raise storage.StorageFailed("s3", found="no route to host", required="an answer", action="Wait")
            return request(*arguments)

        return counted


@pytest.mark.parametrize("answered", [1, 2, *(pytest.param(n, marks=pytest.mark.sweep) for n in (0, 3, 4, 5, 6, 7))])
def test_a_store_that_goes_away_at_any_request_of_a_packing_loses_nothing(
    run, memory, other_machine, monkeypatch, answered
):
    writer = storage.open_writer(URL)
    with monkeypatch.context() as network:
        cut = _Cut(network, answered)
        for step in (writer.pack, writer.close):
            with suppress(storage.StorageFailed):
                step()
    # The objects, the entry, which counts, what it replaces, and the session's seal, which replaces nothing, and end.
    assert (cut.left >= 0) == (answered > 6)
    assert read() == run
    other_machine("second")
    assert read() == run
    assert storage.verify_run(URL) == []
    assert pack(take_over=True) == ([range(3)] if answered < 2 else [])
    assert {*objects(memory)} == used()
    other_machine("third")
    assert read() == run
    assert storage.verify_run(URL) == []


def test_a_packer_that_lost_the_run_without_knowing_packs_nothing_and_its_cache_follows(
    run, other_machine, monkeypatch, tmp_path
):
    zombie = storage.open_writer(URL)
    other_machine("second")
    with storage.open_writer(URL, take_over=True) as heir:
        monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
        with pytest.raises(storage.FencedOut):
            zombie.pack()
        assert [*storage.folder_of(URL).glob("_segments/*")]
        assert read() == run
        assert not [*storage.folder_of(URL).glob("_segments/*")]
        assert not [*(tmp_path / "cache").rglob("*.part")]
        zombie.close()
        writer = storage.current_writer(storage.folder_of(URL), log())
        assert writer is not None
        assert writer.pid == os.getpid()  # the heir, whom only the log knows here
        other_machine("second")
        heir.thin([1])
        assert heir.pack() == [range(3)]
        assert any(name.startswith("_segments/") for name in log().files)  # before the session ends
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(storage.StageThinned):
        storage.open_run(URL)[1].rollouts(0)
    assert storage.verify_run(URL) == []


@pytest.mark.parametrize("order", ["thin, pack", "pack, thin"])
def test_packed_iterations_are_thinned_in_the_store_and_come_back(run, memory, make_batches, other_machine, order):
    values = {ref: value for ref, value, _ in make_batches(T=LONG).iteration(0, rounds=1)}
    other_machine("second")
    with storage.open_writer(URL) as writer:
        for step in order.split(", "):
            writer.thin([0]) if step == "thin" else writer.pack()
    assert not [key for key in objects(memory) if "rollouts_0/observations/c.0" in key]
    other_machine("third")
    with pytest.raises(storage.StageThinned):
        storage.open_run(URL)[0].rollouts(0)
    assert storage.verify_run(URL) == []
    other_machine("fourth")
    with storage.open_writer(URL) as writer:
        writer.restore({ref: value for ref, value in values.items() if writer.run.is_thinned(ref)})
    other_machine("fifth")
    assert read() == run
    assert storage.verify_run(URL) == []


@pytest.mark.parametrize("target", ["memory://bucket/runs/second", "local"])
@pytest.mark.parametrize("iteration", [2, 3])
def test_forks_of_packed_runs(run, memory, make_batches, put, other_machine, target, iteration):
    pack()
    other_machine("second")
    storage.fork_run(storage.open_run(URL), iteration, target, capacity=5, **CREATION)
    memory.rm("/bucket/runs/first", recursive=True)
    other_machine("third")
    fork = storage.open_run(target)
    for ref in fork.refs():
        assert storage.output_digest(storage.digest(fork.load(ref))) == run[str(ref)]
    assert storage.verify_run(target) == []
    with storage.open_writer(target) as writer:
        put(writer, make_batches(T=LONG).iteration(iteration, rounds=1))


@pytest.mark.parametrize(
    ("path", "lost"),
    [
        ("records.parquet", False),
        ("rollouts_0/rewards", True),
        ("observations", False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("records.parquet", True),
                ("tables/episodes.parquet", False),
                ("tables/episodes.parquet", True),
                ("rollouts_0/rewards", False),
                ("observations", True),
            )
        ),
    ],
)
def test_damaged_objects_of_a_segment_are_named_and_repaired(run, memory, make_batches, put, other_machine, path, lost):
    pack()
    other_machine("second")
    key = next(k for k in sorted(objects(memory)) if path in k and "/c.3" not in k and "/00000003." not in k)
    raw = memory.cat_file(key)
    if lost:
        memory.rm_file(key)
    else:
        memory.pipe_file(key, raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:])
    (found,) = storage.verify_run(URL)
    assert found.file.startswith("_segments/00000000-00000002/")
    assert key.removeprefix("/bucket/runs/first/") in found.problem
    other_machine("third")
    with storage.open_writer(URL, repair=True) as writer:
        assert writer.repaired
        batches = make_batches(T=LONG)
        outputs = [output for i in range(ITERATIONS) for output in batches.iteration(i, rounds=1)]
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    assert storage.verify_run(URL) == []
    assert {*objects(memory)} == used()
    assert pack() == [range(3)]
    other_machine("fourth")
    assert read() == run
    assert storage.verify_run(URL) == []


def test_an_entry_of_the_log_that_was_lost_before_others_is_missed(run, memory, other_machine):
    pack()
    last = log().next - 1
    for number in range(last):
        other_machine(f"reader {number}")
        key = f"/bucket/runs/first/_log/{number:08d}.json"
        raw = memory.cat_file(key)
        memory.rm_file(key)
        with pytest.raises(storage.DamagedRun, match=rf"_log/{number:08d}.json: missing; later ones exist"):
            storage.open_run(URL)
        memory.pipe_file(key, raw)
        assert len(storage.open_run(URL)) == ITERATIONS


def test_an_entry_that_appears_while_the_log_is_read_is_not_missed(run, memory, other_machine, monkeypatch):
    other_machine("second")
    get_all, late = ObjectFolder.get_all, ["_log/00000001.json"]

    def get(self, keys, **options):
        found = get_all(self, keys, **options)
        hidden = [key for key in keys if key in late]
        late.clear() if hidden else None
        return [None if key in hidden else raw for key, raw in zip(keys, found, strict=True)]

    monkeypatch.setattr(ObjectFolder, "get_all", get)
    assert len(storage.open_run(URL)) == ITERATIONS


def test_an_entry_that_a_power_cut_has_torn_in_the_cache_is_read_again(run, make_batches, put):
    copies = storage.folder_of(URL).with_name(".first.log") / "entries"
    os.truncate(copies, copies.stat().st_size - 9)
    with storage.open_writer(URL) as writer:
        put(writer, make_batches(T=LONG).iteration(ITERATIONS, rounds=1))
    assert len(storage.open_run(URL)) == ITERATIONS + 1


def test_what_could_not_be_written_into_the_cache_leaves_nothing_there(run, other_machine, monkeypatch):
    def refused(file):
        if file.name.endswith(".part"):
            raise OSError(errno.ENOSPC, "no space left on device")

    other_machine("second")
    with monkeypatch.context() as full:
        full.setattr("metaloom.storage.remote.log.sync_file", refused)
        with pytest.raises(storage.StorageFailed, match="no space left"):
            storage.open_run(URL)
    assert not [*storage.folder_of(URL).parent.rglob("*.part")]
    assert read() == run


def test_entries_about_segments_are_refused_by_earlier_versions_and_others_are_not(run):
    assert {schema(raw) for raw in log().cached_entries()} == {entries.SCHEMAS[0]}
    pack()
    assert [schema(raw) for raw in log().cached_entries()].count(entries.SCHEMAS[1]) == 1


@pytest.mark.parametrize("key", ["../run.json", "_objects/0/1/x", "_objects/0123456789abcdef/00000000/../run.json", 3])
def test_an_entry_that_names_an_object_outside_of_the_run_is_refused(run, key):
    pack()
    raw = next(raw for raw in log().cached_entries() if schema(raw) == entries.SCHEMAS[1])
    document = entries.parse_sealed(raw)
    moved = next(name for name, about in document["files"].items() if "key" in about)
    document["files"][moved]["key"] = key
    with pytest.raises(ValueError, match=r"not a log entry|which is not part of a run"):
        entries.Entry.parse(entries.render(entries.sealed(document)))


def test_the_cache_may_be_removed_after_packing(run, other_machine):
    pack()
    folder = storage.folder_of(URL)
    shutil.rmtree(folder)
    assert read() == run
    shutil.rmtree(folder)
    with storage.open_writer(URL) as writer:
        assert writer.pack() == []
    assert read() == run


def test_a_writer_makes_its_cache_what_the_store_has(run):
    folder = storage.folder_of(URL)
    surplus = shutil.copy(folder / "tables/tasks/00000003.parquet", folder / "tables/tasks/00000009.parquet")
    shutil.rmtree(folder / "data.zarr" / "tasks")
    metadata = folder / "data.zarr" / "samples_0" / "returns" / "zarr.json"
    metadata.unlink()
    metadata.mkdir()
    storage.open_writer(URL).close()
    assert not surplus.exists()
    assert read() == run
    assert storage.verify_run(URL) == []
