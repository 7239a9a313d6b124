"""Refusals of the system: told with the run and what helps; they lose nothing and do not count as damage."""

import errno
import os
import resource
import stat
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef, opening
from metaloom.storage.format.files import read_file
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.history import read_history
from metaloom.storage.write.sessions import Session


@contextmanager
def full_disk(file_bytes):
    """Let no file grow beyond a size; the limit gives an error of the system as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_writer_with_advice_and_what_was_stored_can_be_gone_on_with(
    tmp_path, creation, put, make_batches, caplog
):
    outputs = make_batches(B=20, E=10, T=20).iteration(0)

    def train():
        with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
            put(writer, outputs[:2])
            writer.flush()
            with full_disk(10_000):
                put(writer, outputs[2:])
                writer.flush()

    with pytest.raises(
        storage.StorageFailed, match=r"run: File too large.*Free space.*metaloom resume .*/run"
    ) as caught:
        train()
    assert caught.value.__cause__.errno == errno.EFBIG
    assert caplog.text == ""  # it is raised; it need not be logged as well
    assert storage.verify_run(tmp_path / "run") == []
    with storage.open_writer(tmp_path / "run") as writer:
        assert writer.run.refs() == [ref for ref, _, _ in outputs[:2]]
        put(writer, outputs[2:])
    assert len(storage.open_run(tmp_path / "run")) == 1


def test_a_run_that_the_disk_had_no_room_for_can_be_created_and_opened_once_there_is_some(tmp_path, creation):
    with full_disk(0), pytest.raises(storage.StorageFailed, match=r"too large.*METALOOM_RUNS"):
        storage.create_run(tmp_path / "run", capacity=1, **creation)
    storage.create_run(tmp_path / "run", capacity=1, **creation).close()
    with full_disk(0), pytest.raises(storage.StorageFailed, match=r"too large.*Free space"):
        storage.open_writer(tmp_path / "run")
    storage.open_writer(tmp_path / "run").close()


@pytest.mark.parametrize("place", ["/proc/nope/run", "/proc/run", "{tmp}/file/run", "{tmp}/file/runs/run"])
def test_a_place_where_no_run_can_be_is_refused_before_and_at_creation(tmp_path, creation, place):
    (tmp_path / "file").touch()
    path = place.format(tmp=tmp_path)
    for create in (storage.check_new_run, lambda path: storage.create_run(path, capacity=1, **creation)):
        with pytest.raises(storage.StorageFailed, match=f"{path}: .*METALOOM_RUNS"):
            create(path)


def test_checking_a_place_leaves_nothing_there_and_refuses_one_that_is_taken(tmp_path, make_run):
    storage.check_new_run(tmp_path / "some" / "where" / "run")
    assert os.listdir(tmp_path) == []
    with pytest.raises(storage.RunExists, match="a run"):
        storage.check_new_run(make_run(1))


def test_a_writer_that_cannot_end_its_session_lets_the_next_one_in(tmp_path, creation, monkeypatch):
    writer = storage.create_run(tmp_path / "run", capacity=1, **creation)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(storage.StorageFailed, match="No space left"):
        writer.close()
    monkeypatch.undo()
    storage.open_writer(tmp_path / "run").close()


def test_a_file_that_we_may_not_read_is_no_damage_that_repair_throws_away(make_run, run_digests, monkeypatch):
    path = make_run(1)
    expected, open_ = run_digests(path), os.open

    def refuse(file, *arguments, **named):
        if "rewards" in str(file) and os.path.basename(file).startswith("c."):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return open_(file, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    for read in (lambda: storage.open_run(path)[0].rollouts(0), lambda: storage.open_writer(path, repair=True)):
        with pytest.raises(storage.StorageFailed, match=r"rewards/c.*Permission denied"):
            read()
    assert any("Permission denied" in damage.problem for damage in storage.verify_run(path))
    monkeypatch.undo()
    assert run_digests(path) == expected


def test_a_runs_folder_that_we_may_not_enter_is_named(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    path = tmp_path / "run"
    with pytest.raises(storage.StorageFailed, match=rf"{path}: Permission denied: {path}; this needs"):
        storage.open_run(path)


@pytest.mark.parametrize("name", ["first", "tables"])
def test_damage_of_what_one_stage_wrote_advises_to_repair_the_run_by_its_path(make_run, name):
    path = make_run(1, name=f"tables/{name}")
    run = storage.open_run(path)
    for file, read in {
        "data.zarr/rollouts_0/rewards/c.0.0.0.0": lambda: run[0].rollouts(0),
        f"_commits/{StageRef(0, 'adapt').file_name}": lambda: run[0].adapted(0),
        "tables/episodes/00000000.parquet": run.episodes,
    }.items():
        os.truncate(path / file, 9)
        with pytest.raises(storage.DamagedRun, match=f"verify {path}`.*`metaloom resume {path} --repair`"):
            read()


@pytest.mark.parametrize("file", ["run.json", "data.zarr/rollouts_0/rewards/zarr.json"])
def test_damage_of_what_all_iterations_share_advises_repair_too(make_run, file):
    path = make_run(1, name="first")
    os.truncate(path / file, 9)
    with pytest.raises(storage.DamagedRun, match=f"`metaloom resume {path} --repair` repairs it"):
        storage.open_run(path)[0].rollouts(0)


def test_a_locked_run_is_named_in_the_advice(tmp_path, creation):
    with (
        storage.create_run(tmp_path / "run", capacity=1, **creation),
        pytest.raises(storage.RunLocked, match=f"metaloom resume {tmp_path}/run --take-over"),
    ):
        storage.open_writer(tmp_path / "run")


def test_damage_of_a_run_in_the_working_folder_names_a_path_and_no_name(make_run, monkeypatch):
    monkeypatch.chdir(make_run(1, name="first").parent)
    os.truncate("first/run.json", 9)
    with pytest.raises(storage.DamagedRun, match=r"`metaloom verify \./first`"):
        storage.open_run(Path("first"))


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_files_and_folders_have_the_modes_that_the_umask_leaves(tmp_path, creation, put, batches, umask):
    before = os.umask(umask)
    try:
        with storage.create_run(tmp_path / "run", capacity=3, **creation) as writer:
            for i in range(3):
                put(writer, batches.iteration(i))
            writer.thin([0])
            writer.pack()
        storage.fork_run(storage.open_run(tmp_path / "run"), 2, tmp_path / "fork", capacity=3, **creation)
        storage.put_in_quarantine(
            tmp_path / "run", StageRef(0, "adapt"), message="", about={}, arrays={"x": np.ones(3)}
        )
        with storage.open_writer(tmp_path / "fork"):
            pass
    finally:
        os.umask(before)
    for path in (tmp_path / "run", *tmp_path.glob("run/**/*"), tmp_path / "fork", *tmp_path.glob("fork/**/*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("name", ["_commits", "_segments", "_thinned"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(make_run, name):
    path = make_run(1)
    run = storage.open_run(path)
    if (path / name).exists():
        os.rename(path / name, path / "elsewhere")
    os.symlink(name, path / name)
    with pytest.raises(
        storage.StorageFailed, match=f"{name}: .*symbolic links; this needs a folder that can be listed"
    ):
        run.thinned_iterations() if name == "_thinned" else run.refs()


def test_sizes_of_a_folder_count_around_a_file_that_vanishes_and_report_a_system_out_of_descriptors(
    make_run, monkeypatch
):
    run, real = make_run(1), os.scandir
    sizes = storage.open_run(run).files.sizes()

    @contextmanager
    def with_vanished(folder):
        with real(folder) as entries:
            found = [*entries]
        gone = Path(folder, ".gone")
        gone.touch()
        with real(folder) as entries:
            found[:0] = [entry for entry in entries if entry.name == gone.name]
        gone.unlink()
        yield iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", with_vanished)
        assert storage.open_run(run).files.sizes() == sizes

    def refuse(folder):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(folder))

    def deny(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    opened = storage.open_run(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", deny)
        assert opened.files.sizes() == {}
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(storage.StorageFailed, match=f"{run.name}: Too many open files.*ulimit -n"):
        opened.files.sizes()


def test_a_link_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"elsewhere")
    os.symlink("file", tmp_path / "link")
    assert read_file(tmp_path / "file", limit=9) == b"elsewhere"
    with pytest.raises(storage.DamagedRun, match="link: a symbolic link"):
        read_file(tmp_path / "link", limit=9)


def test_requests_to_a_writer_are_not_written_through_a_link(make_run, tmp_path):
    path = make_run(1)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", path / "_operator")
    with pytest.raises(storage.DamagedRun, match="_operator: a symbolic link"):
        storage.ask_to_stop(path, "0" * 16)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_disk_that_stores_other_bytes_ends_a_packing_and_loses_nothing(make_run, run_digests, monkeypatch):
    path, write = make_run(3), Session.write_folder
    expected = run_digests(path)

    def flip(session, contents):
        part = write(session, contents)
        raw = bytearray((part / "records.parquet").read_bytes())
        raw[9] ^= 1
        (part / "records.parquet").write_bytes(raw)
        return part

    monkeypatch.setattr(Session, "write_folder", flip)
    with (
        storage.open_writer(path) as writer,
        pytest.raises(storage.StorageFailed, match=r"records\.parquet: bytes that differ from what was written"),
    ):
        writer.pack()
    assert storage.open_run(path).files.segments.names() == []
    assert run_digests(path) == expected
    assert storage.verify_run(path) == []


def test_a_runs_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", lambda path: os.listdir(os.fspath(path) + "/nothing"))
    with pytest.raises(storage.StorageFailed, match=r"No such file or directory: .*a folder that can be read"):
        storage.find_runs(tmp_path)


def test_a_run_of_the_first_format_is_not_packed(tmp_path, creation, put, make_batches, monkeypatch):
    monkeypatch.setattr("metaloom.storage.write.creation.FORMAT", "metaloom/1")
    batches = make_batches(B=1, E=1, T=2)
    with storage.create_run(tmp_path / "run", capacity=2, **creation) as writer:
        put(writer, [*batches.iteration(0), *batches.iteration(1)])
        with pytest.raises(storage.StoreError, match=r"run: a run of format metaloom/1, .*Leave it unpacked"):
            writer.pack()
    assert storage.open_run(tmp_path / "run").files.segments.names() == []


def test_a_run_needs_room_for_an_iteration(tmp_path, creation):
    with pytest.raises(ValueError, match="capacity is 0; it must be at least 1"):
        storage.create_run(tmp_path / "run", capacity=0, **creation)
    assert os.listdir(tmp_path) == []


def test_a_writer_whose_run_is_packed_by_a_later_one_while_it_opens_it_gives_up(make_run, monkeypatch):
    path, live, heirs = make_run(3), CommittedFiles.live_refs, []

    def late(files, *iterations):
        refs = live(files, *iterations)
        monkeypatch.setattr(CommittedFiles, "live_refs", live)
        heirs.append(storage.open_writer(path, take_over=True))
        heirs[0].pack()
        return refs

    def delayed(files, info):
        monkeypatch.setattr(CommittedFiles, "live_refs", late)
        monkeypatch.setattr(opening, "read_history", read_history)
        return read_history(files, info)

    monkeypatch.setattr(opening, "read_history", delayed)
    with pytest.raises(storage.FencedOut, match="session 1 of this process, which a later writer ended"):
        storage.open_writer(path)
    heirs[0].close()
    assert storage.verify_run(path) == []
