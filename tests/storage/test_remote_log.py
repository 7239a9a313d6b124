"""The log of a run under object storage: what no session wrote is refused, whatever its checksum.

The store is fsspec's in memory; tests/storage/test_object_storage.py asks a real server.
"""

import fcntl
import os
import sys
from functools import partial

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from metaloom import storage
from metaloom.storage.format.files import parse_sealed, render, sealed
from metaloom.storage.remote.entries import LoggedFile, in_groups
from metaloom.storage.remote.log import RemoteLog, sealed_in
from metaloom.storage.remote.objects import _PASSING, TIMEOUT, Deadlines, ObjectFolder

URL = "memory://bucket/runs/first"
LOG = "/bucket/runs/first/_log"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """An empty store in memory, with an empty cache."""
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def run(memory, creation, put, make_batches):
    """A run with one output; returns the keys of its log's entries."""
    with storage.create_run(URL, capacity=1, **creation) as writer:
        put(writer, make_batches(B=2, E=1, T=3).iteration(0)[:1])
    return sorted(memory.find(LOG))


def forge(memory, key, **changes):
    """Change an entry and give it a right checksum again; None removes a member."""
    document = parse_sealed(memory.cat_file(key)) | changes
    memory.pipe_file(key, render(sealed({name: value for name, value in document.items() if value is not None})))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": "metaloom/99"}, "schema 'metaloom/99' or kind 'end'"),
        ({"kind": "dream"}, "kind 'dream'"),
        ({"previous": "0" * 64}, "does not follow the entry before it"),
        ({"sequence": 0}, "does not follow the entry before it"),
        ({"session": "0" * 16}, "belongs to a different session from the one"),
        ({"session": "../x"}, "not part of a run"),
        ({"removed": ["../x"]}, r"names \['\.\./x'\], which is not part of a run"),
        ({"files": {"../x": {"text": ""}}}, r"names \['\.\./x'\], which is not part of a run"),
        ({"files": {"tables/tasks/00000000.parquet": {"key": "../x"}}}, r"names the object '\.\./x'"),
        ({"files": {"tables/tasks/00000000.parquet": {}}}, r"not a log entry \(KeyError: 'size'\)"),
        ({"removed": None}, r"not a log entry \(KeyError: 'removed'\)"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_an_entry_that_no_session_wrote_is_refused(memory, run, other_machine, changes, problem):
    forge(memory, run[-1], **changes)
    other_machine("second")
    name = run[-1].rpartition("/")[2]
    with pytest.raises(storage.DamagedRun, match=rf"{URL}/_log/{name}: .*{problem}.*; expected the entry"):
        storage.open_run(URL)
    for path in storage.folder_of(URL).parent.rglob("*"):
        assert path.name != "x"


def test_an_entry_in_the_cache_that_no_session_wrote_is_named_by_its_file(run):
    entries = storage.folder_of(URL).with_name(".first.log") / "entries"
    assert entries.exists()
    entries.write_bytes(entries.read_bytes().replace(b'"kind":"commit"', b'"kind":"comm1t"'))
    with pytest.raises(storage.DamagedRun, match=rf"{entries}: the content does not match its checksum"):
        storage.open_run(URL)


def test_a_gap_in_the_log_is_named(memory, run, other_machine):
    for machine, keys in (("second", run[1:2]), ("third", run[3:])):  # in the end, one other entry follows the gap
        for key in keys:
            memory.rm(key)
        other_machine(machine)
        with pytest.raises(storage.DamagedRun, match=rf"{URL}/_log/00000001\.json: missing; later ones exist"):
            storage.open_run(URL)


def test_files_that_the_cache_does_not_have_are_downloaded_together(run, other_machine, monkeypatch):
    asked, get_all = [], ObjectFolder.get_all

    def count(self, keys, **options):
        asked.append([*keys])
        return get_all(self, keys, **options)

    other_machine("second")
    storage.open_run(URL)
    log = RemoteLog.of(storage.folder_of(URL))
    log.pull()
    names = [name for name, file in log.files.items() if file.key]
    monkeypatch.setattr(ObjectFolder, "get_all", count)
    for _ in range(2):
        log.fetch_all(["run.json", *names, "nowhere"])
    assert asked == [[log.files[name].key for name in names]]
    assert all(log.local_path(name).exists() for name in names)
    assert [log.fetch(name) for name in ("run.json", "nowhere", names[0])] == [False, False, True]


def test_verification_names_every_entry_of_the_log_that_is_damaged(memory, run):
    memory.pipe_file(run[0], b"{}")
    memory.rm(run[1])
    assert [(damage.file, damage.problem) for damage in storage.verify_run(URL)] == [
        ("_log/00000000.json", "not the entry that was written"),
        ("_log/00000001.json", "missing"),
    ]


def test_a_file_of_a_segment_that_the_cache_does_not_have_is_not_written(run):
    log = RemoteLog.of(storage.folder_of(URL))
    log.write("_segments/00000000-00000002/records.parquet", b"x")
    assert not (log.root / "_segments").exists()


def test_a_reader_waits_for_another_process_that_reads_the_log(run, monkeypatch):
    flock = fcntl.flock
    with open(storage.folder_of(URL).with_name(".first.log") / "lock") as other:
        flock(other, fcntl.LOCK_EX)

        def lock(descriptor, operation):
            if not operation & fcntl.LOCK_NB:
                other.close()  # while this process waits
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", lock)
        assert len(storage.open_run(URL).refs()) == 1
        assert other.closed


@pytest.mark.parametrize("found", ["no", "another"])
def test_a_store_that_holds_another_run_than_the_cache_is_refused(memory, run, creation, found):
    memory.rm("/bucket/runs/first", recursive=True)
    if found == "another":
        memory.pipe({key: b"another" for key in run})
    with pytest.raises(
        storage.StoreError,
        match=rf"{URL}: {found} entry {len(run) - 1} in the log; expected the same entry as in the cache",
    ):
        storage.open_run(URL)


def test_a_run_that_another_machine_writes_is_locked_until_that_session_ends(run, other_machine, monkeypatch, tmp_path):
    writer = storage.open_writer(URL)
    other_machine("second")
    with pytest.raises(storage.RunLocked, match=rf"process {os.getpid()} on .*--take-over"):
        storage.open_writer(URL)
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    writer.close()
    other_machine("second")
    storage.open_writer(URL).close()


@pytest.fixture
def begun(memory, creation):
    """The log of a run whose creation was killed after its first entry."""

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metaloom.storage.opening.write_skeleton", stop)
        patch.setattr("metaloom.storage.remote.session.RemoteSession.end", lambda session: None)
        with pytest.raises(KeyboardInterrupt):
            storage.create_run(URL, capacity=1, **creation)
    return memory.find(LOG)


def test_a_cache_that_knows_one_entry_misses_it(memory, begun, creation):
    memory.rm(*begun)
    with pytest.raises(storage.StoreError, match=f"{URL}: no entry 0 in the log; expected the same entry as in"):
        storage.create_run(URL, capacity=1, **creation)


def test_a_creation_that_another_machine_began_is_locked_and_says_how_to_clear_it(
    begun, creation, other_machine, make_run
):
    other_machine("second")
    parent = storage.open_run(make_run(1))
    for use in (storage.create_run, partial(storage.fork_run, parent, 1)):
        with pytest.raises(storage.RunLocked, match=rf"it had not even created the run: remove {URL}, or choose"):
            use(URL, capacity=1, **creation)


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(memory, creation, monkeypatch):
    monkeypatch.setattr(ObjectFolder, "put_new", lambda self, key, content: self.put_all({key: content}) is None)
    with pytest.raises(storage.StorageFailed, match=r"ignores the condition of a put \(If-None-Match\)"):
        storage.create_run(URL, capacity=1, **creation)
    assert not [key for key in memory.find("/bucket") if "run.json" in key]


def test_what_a_session_uploaded_in_vain_is_removed_though_it_could_still_have_ended(run, put, make_batches, memory):
    def refused(*_):
        raise storage.StorageFailed("s3", found="no route to host", required="an answer", action="Wait")

    writer = storage.open_writer(URL)
    before = memory.find("/bucket/runs/first/_objects")
    with pytest.MonkeyPatch.context() as network:
        network.setattr(ObjectFolder, "put_new", refused)
        put(writer, make_batches(B=2, E=1, T=3).iteration(0)[1:3])
        with pytest.raises(storage.StorageFailed):
            writer.flush()
    assert memory.find("/bucket/runs/first/_objects") != before
    with pytest.raises(storage.StorageFailed):
        writer.close()
    storage.open_writer(URL).close()
    assert memory.find("/bucket/runs/first/_objects") == before


def test_files_are_fetched_in_groups_of_little_more_than_64_mib():
    files = [(str(n), LoggedFile(40 * 2**20)) for n in range(5)]
    assert [[name for name, _ in group] for group in in_groups(files)] == [["0", "1"], ["2", "3"], ["4"]]


def test_what_does_not_fit_into_memory_is_uploaded_in_parts(memory, creation, put, make_batches, monkeypatch):
    sent, put_all = [], ObjectFolder.put_all

    def count(self, contents):
        sent.append(len(contents))
        put_all(self, contents)

    monkeypatch.setattr("metaloom.storage.remote.session._BYTES_AT_ONCE", 0)
    monkeypatch.setattr(ObjectFolder, "put_all", count)
    with storage.create_run(URL, capacity=1, **creation) as writer:
        put(writer, make_batches(B=2, E=1, T=3).iteration(0)[:1])
    assert set(sent) == {0, 1}
    assert storage.verify_run(URL) == []


def test_a_capacity_of_as_many_digits_is_stored(run, other_machine):
    storage.open_writer(URL, capacity=2).close()
    other_machine("second")
    assert storage.open_run(URL).capacity == 2


def test_only_the_seal_in_a_segments_own_folder_makes_it_whole():
    """The cache replaces or drops a sealed folder as a whole, so a seal anywhere else must not count."""
    segment = "_segments/00000000-00000003"
    others = [f"{segment}/data.zarr/seal.json", "_commits/seal.json", "data.zarr/tasks/seal.json", "seal.json"]
    assert sealed_in([f"{segment}/seal.json", *others]) == {segment}


def test_a_folder_of_the_store_that_holds_no_run_is_not_listed(memory, run):
    memory.pipe("/bucket/runs/other/notes.txt", b"mine")
    assert [path.name for path in storage.find_runs(storage.folder_of("memory://bucket/runs"))] == ["first"]


def answered(status):
    """The error of a request that the store answered with a status."""
    error = OSError(f"status {status}")
    error.__cause__ = type(
        "ClientError", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": status}}}
    )()
    return error


@pytest.mark.parametrize(
    ("errors", "may_pass"),
    [
        ([FileNotFoundError(), FileExistsError(), PermissionError(), ValueError()], False),
        ([answered(status) for status in (400, 403, 404, 412, 499)], False),
        ([answered(status) for status in (399, 408, 425, 429, 500, 503)], True),
        ([OSError(), TimeoutError(), *(type(name, (Exception,), {})() for name in sorted(_PASSING))], True),
    ],
    ids=["final", "refused", "busy", "disturbed"],
)
def test_a_request_is_made_again_only_after_an_error_that_may_pass(errors, may_pass, monkeypatch, caplog):
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    for error in errors:
        asked, known, words = [], len(pauses), len(caplog.messages)

        def request(asked=asked, error=error):
            asked.append(1)
            raise error

        with pytest.raises(type(error)):
            Deadlines(1.0, 3).ask("s3://bucket", request)
        assert (len(asked), pauses[known:]) == ((3, [0.5, 1.0]) if may_pass else (1, [])), error
        tries = [message.rpartition("trying ")[2] for message in caplog.messages[words:]]
        assert tries == (["again (2 of 3)", "again (3 of 3)"] if may_pass else [])


def test_an_answer_may_take_twice_the_time_without_one_and_its_size_at_100_kb_a_second(monkeypatch):
    class Patient(fsspec.AbstractFileSystem):
        async_impl = True

        def cat(self, paths, *, on_error, timeout):
            waits.append(timeout)
            return dict.fromkeys(paths)

        def pipe_file(self, path, content, *, mode, timeout):
            waits.append(timeout)

        def rm(self, paths, *, timeout):
            waits.append(timeout)

    waits: list[float] = []
    monkeypatch.delenv(TIMEOUT, raising=False)
    fsspec.register_implementation("patient", Patient, clobber=True)
    objects = ObjectFolder("patient://bucket")
    objects.get_all(["a"], num_bytes=3_000_000)
    objects.put_new("a", b"x" * 200_000)
    objects.get_all(["a", "b"])
    objects.remove(["a", "b"])
    assert waits[:2] == [2 * 20 + 30, 2 * 20 + 2]
    assert all(40.5 < seconds < 50 for seconds in waits[2:])  # whose sizes are not known


def test_a_missing_back_end_is_named_with_what_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(storage.StorageFailed, match=r"s3://bucket/runs/first: .*pip install 'metaloom\[s3\]'"):
        storage.open_run("s3://bucket/runs/first")
