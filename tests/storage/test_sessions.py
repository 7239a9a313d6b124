"""Files that a session writes hold what was given, whatever the disk takes at a time."""

import contextlib
import errno
import fcntl
import os

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage.write import sessions
from metaloom.storage.write.holder import acquire_lock
from metaloom.storage.write.sessions import FileCreator, begin_session

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="a system without O_DIRECT")
BLOCK, MIB = 4096, 2**20
PIECES = {
    "a small file": (1000,),
    "the smallest past the page cache": (MIB // 4,),
    "blocks and a rest": (MIB, 5),
    "most of the buffer": (3 * MIB + 5,),
    "exactly the buffer": (4 * MIB,),
    "buffers": (8 * MIB,),
    "a byte more than the buffer": (4 * MIB + 1,),
    "pieces across the ends of buffers": (MIB, 3 * MIB - 1, 2, 4 * MIB, 0, BLOCK, 7),
}


@pytest.fixture(params=["past the page cache", "refused at once", "refused later", "ordinary"])
def disk(request, monkeypatch):
    """A disk with files that are written past the page cache, as far as it likes that; returns how they were opened."""
    opened, direct, writes = [], set(), []
    real_open, real_write, real_fcntl = os.open, os.write, fcntl.fcntl

    def open_(path, flags, *mode):
        opened.append(bool(flags & os.O_DIRECT))
        descriptor = real_open(path, flags & ~os.O_DIRECT, *mode)
        if opened[-1] and request.param == "refused at once":  # some systems have created it by then
            os.close(descriptor)
            raise OSError(errno.EINVAL, "refused")
        if opened[-1]:
            direct.add(descriptor)
        return descriptor

    def write(descriptor, content):
        writes.append(len(content))
        if descriptor in direct:
            assert len(content) % BLOCK == 0
            if request.param == "refused later" and len(writes) > 1:
                raise OSError(errno.EINVAL, "refused")
        # As a disk may, that takes a part and leaves the rest for the next call.
        return real_write(descriptor, content[: max(BLOCK, len(content) // 2 // BLOCK * BLOCK)])

    def control(descriptor, command, *argument):
        if command == fcntl.F_SETFL:
            direct.discard(descriptor)
        found = real_fcntl(descriptor, command, *argument)
        return found | os.O_DIRECT if command == fcntl.F_GETFL and descriptor in direct else found

    if request.param == "ordinary":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "write", write)
    return opened


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
def test_a_file_holds_what_was_written_whatever_its_size_and_the_disk(disk, tmp_path, sizes):
    rng = np.random.default_rng(len(sizes))
    content = tuple(rng.bytes(size) for size in sizes)
    creator = FileCreator()
    for name in ("first", "second"):
        os.close(creator.create(tmp_path / name, content))
        assert (tmp_path / name).read_bytes() == b"".join(content)


def test_a_disk_that_refuses_is_asked_once(disk, tmp_path, request):
    creator = FileCreator()
    for n in range(3):
        os.close(creator.create(tmp_path / str(n), (bytes(5 * MIB),)))
    asked = {"past the page cache": [True] * 3, "refused at once": [True, False, False, False], "ordinary": []}
    assert disk == asked.get(request.node.callspec.params["disk"], [True, False, False])


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        FileCreator().create(tmp_path / "there", (bytes(MIB),))
    assert (tmp_path / "there").read_bytes() == b"old"


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


def test_an_error_of_the_disk_is_not_taken_for_one_that_has_no_direct_writes(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    real, opened = fcntl.fcntl, os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: opened(path, flags & ~os.O_DIRECT, *mode))
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: real(*arguments) | os.O_DIRECT)
    monkeypatch.setattr(FileCreator, "_write_blocks", fail)
    with pytest.raises(OSError, match="No space left on device"):
        FileCreator().create(tmp_path / "file", (bytes(MIB),))


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


def test_numbers_of_sessions_end_where_names_of_folders_do(tmp_path):
    last = tmp_path / "_sessions" / f"{sessions.MOST_SESSIONS - 1}-{'0' * 16}"
    last.mkdir(parents=True)
    (last / "session.json").touch()
    with pytest.raises(storage.DamagedRun, match=f"_sessions: names session {sessions.MOST_SESSIONS - 1}; expected"):
        begin_session(tmp_path, take_over=False)
