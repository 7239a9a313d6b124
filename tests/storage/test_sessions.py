"""Files that a session writes hold what was given, whatever the disk takes at a time."""

import errno
import fcntl
import os

import numpy as np
import pytest

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
