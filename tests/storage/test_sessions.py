"""Files that a session writes hold what was given, whatever the disk takes at a time."""

import contextlib
import errno
import os

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage.write import sessions
from metaloom.storage.write.holder import acquire_lock
from metaloom.storage.write.sessions import begin_session


@pytest.mark.parametrize("sizes", [(0,), (1000,), (2**20, 3 * 2**20 - 1, 0, 7)])
def test_a_file_holds_what_was_written_though_the_disk_takes_a_part_at_a_time(tmp_path, monkeypatch, sizes):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[: len(content) // 2 + 1]))
    content = tuple(np.random.default_rng(0).bytes(size) for size in sizes)
    session = begin_session(tmp_path, take_over=False)
    (path,) = session.write_aside([content])
    assert path.read_bytes() == b"".join(content)
    session.close()


def test_a_file_that_is_there_stays(tmp_path):
    session = begin_session(tmp_path, take_over=False)
    there = session.folder / f"{session._parts + 1:08d}.part"
    there.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        session.write_aside([(b"new",)])
    assert there.read_bytes() == b"old"
    session.close()


def test_an_error_of_the_disk_is_raised_and_leaves_no_open_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    session = begin_session(tmp_path, take_over=False)
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(OSError, match="No space left on device"):
            session.write_aside([(b"new",)])
    assert len(os.listdir("/proc/self/fd")) == opened
    session.close()


def test_a_session_leaves_no_second_name_of_what_it_published_and_linked(tmp_path):
    session = begin_session(tmp_path, take_over=False)
    session.publish(b"whole", tmp_path / "published")
    (tmp_path / "large").write_bytes(b"large")
    for _ in range(2):  # the second time, both are names of one file already
        session.link({tmp_path / "large": tmp_path / "linked"})
    assert (tmp_path / "published").read_bytes() == b"whole"
    assert (tmp_path / "linked").samefile(tmp_path / "large")
    assert [*session.folder.glob("*.part")] == []
    session.close()


@pytest.fixture
def taken_over(tmp_path):
    """A session, a part that it has written, and a function after which a later session holds the run."""
    session = begin_session(tmp_path, take_over=False)
    (part,) = session.write_aside([(b"mine",)])
    heirs = []

    def take_over():
        heirs.append(begin_session(tmp_path, take_over=True))

    yield session, part, take_over
    for heir in heirs:
        heir.close()


ACTS = {
    "write_aside": lambda session, part, root: session.write_aside([(b"more",)]),
    "replace": lambda session, part, root: session.replace([part], [root / "target"]),
    "remove": lambda session, part, root: session.remove([root / "kept"]),
    "write_folder": lambda session, part, root: session.write_folder([("file", (b"more",))]),
    "place_folder": lambda session, part, root: session.place_folder(part, root / "target"),
    "link": lambda session, part, root: session.link({root / "kept": root / "target"}),
    "describe": lambda session, part, root: session.describe({"facts": 1}),
}


@pytest.mark.parametrize("act", ACTS)
def test_nothing_that_a_session_does_has_an_effect_once_a_later_one_has_begun(tmp_path, taken_over, act):
    session, part, take_over = taken_over
    (tmp_path / "kept").write_bytes(b"kept")
    take_over()
    with pytest.raises(storage.FencedOut, match=r"session 0 of this process, which a later writer ended"):
        ACTS[act](session, part, tmp_path)
    assert (tmp_path / "kept").read_bytes() == b"kept"
    assert not (tmp_path / "target").exists()


def test_a_session_that_ends_between_writing_and_publishing_publishes_nothing(tmp_path, taken_over, monkeypatch):
    session, part, take_over = taken_over

    def late(contents):
        take_over()
        return [part]

    monkeypatch.setattr(session, "write_aside", late)
    with pytest.raises(storage.FencedOut, match="session 0 of this process"):
        session.publish(b"mine", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("act", ["replace", "place_folder"])
def test_a_part_that_is_gone_though_the_session_goes_on_is_an_error_of_its_own(tmp_path, taken_over, act):
    session, part, _ = taken_over
    part.unlink()
    with pytest.raises(FileNotFoundError, match=part.name):
        ACTS[act](session, part, tmp_path)
    session.close()


def test_a_file_that_is_gone_is_neither_linked_nor_removed(tmp_path, taken_over):
    session, _, _ = taken_over
    session.link({tmp_path / "gone": tmp_path / "target"})
    session.remove([tmp_path / "gone"])
    assert not (tmp_path / "target").exists()
    session.close()


def test_a_session_that_begins_after_its_lock_was_taken_gives_up(tmp_path):
    lock = acquire_lock(tmp_path / "writer.lock", "0" * 16, take_over=False)
    with contextlib.closing(begin_session(tmp_path, take_over=True)) as heir:
        with pytest.raises(storage.FencedOut, match="session 1 of this process, which a later writer ended"):
            sessions._begin(tmp_path, "0" * 16, lock)
        assert heir.folder.is_dir()
    lock.release()


def test_a_lock_whose_holder_is_not_named_yet_is_refused(tmp_path):
    path = tmp_path / "writer.lock"
    lock = acquire_lock(path, "0" * 16, take_over=False)
    os.truncate(path, 0)
    with pytest.raises(storage.RunLocked, match="another process is about to write it; expected no other writer"):
        acquire_lock(path, "1" * 16, take_over=False)
    assert lock.is_held()
    lock.release()
    assert path.read_bytes() == b""


def test_numbers_of_sessions_end_where_names_of_folders_do(tmp_path):
    last = tmp_path / "_sessions" / f"{sessions.MOST_SESSIONS - 1}-{'0' * 16}"
    last.mkdir(parents=True)
    (last / "session.json").touch()
    with pytest.raises(storage.DamagedRun, match=f"_sessions: names session {sessions.MOST_SESSIONS - 1}; expected"):
        begin_session(tmp_path, take_over=False)
