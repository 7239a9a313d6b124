"""Any one file of a run flipped, cut, lost or replaced by a folder: `--repair` brings back what was there (T27)."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import resume
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage.write.publisher import Publisher

SERIAL = Backend(workers=0)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


WAYS = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "lost": os.unlink,
    "folder": replace_by_folder,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train_tiny):
    """A run, one of whose iterations is thinned, a fork of it, and the run with its first two iterations packed."""
    folder = tmp_path_factory.mktemp("whole")
    run = train_tiny(folder / "run", iterations=3)
    fork(run, 2, folder / "fork")
    resume(folder / "fork", backend=SERIAL)
    thin(run, storage.Retention(keep_last=1))
    shutil.copytree(run, folder / "packed")
    with storage.open_writer(folder / "packed") as writer:
        assert writer.pack() == [range(2)]
    return {"run": run, "fork": folder / "fork", "packed": folder / "packed"}


def cases(whole, dice=None):
    """Every file with every way to damage it; with dice, one of each kind of file and one way."""
    kinds = {}
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        relative = path.relative_to(whole)
        ways = WAYS if path.stat().st_size else ("lost", "folder")
        kind = (len(relative.parts), relative.parts[0], relative.suffix, relative.name == "run.json")
        kinds.setdefault(kind, []).extend((relative, way) for way in ways)
    for found in kinds.values():
        yield from [dice.choice(found)] if dice else found


def check(whole, folder, digests, relative, way):
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    WAYS[way](path / relative)
    needed = storage.verify_run(path) != []
    result = resume(path, repair=True, backend=SERIAL)
    assert result.damage == [], f"{relative} {way}"
    assert digests(path) == digests(whole), f"{relative} {way}"
    assert bool(result.repaired) or not needed or (way == "lost" and relative.parts[0] == "_commits"), (
        f"{relative} {way}: nothing was said"
    )


@pytest.mark.no_cover
@pytest.mark.parametrize("which", ["run", "fork", "packed"])
def test_a_damaged_file_of_each_kind_comes_back(runs, which, tmp_path, digests):
    found = [*cases(runs[which], random.Random(4))]
    assert len(found) >= 9
    # Without it there is nothing to ask for trust until it is back.
    found.append((Path("run.json"), "lost"))
    for relative, way in found:
        check(runs[which], tmp_path, digests, relative, way)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("which", "folder"), [("run", "data.zarr/samples_0"), ("packed", "data.zarr/samples_0"), ("run", "_sessions/0*")]
)
def test_a_lost_folder_comes_back(runs, tmp_path, digests, which, folder):
    path = shutil.copytree(runs[which], tmp_path / "run")
    lost = sorted(found for found in path.glob(folder) if found.is_dir())[0]
    shutil.rmtree(lost)
    result = resume(path, repair=True, backend=SERIAL)
    assert (result.damage, lost.is_dir()) == ([], True)
    assert any(str(lost.relative_to(path)) in line for line in result.repaired)
    assert digests(path) == digests(runs[which])


def test_damaged_sessions_are_described_again_by_the_first_of_all_records_they_made(runs, tmp_path):
    path = shutil.copytree(runs["packed"], tmp_path / "run")
    first, sound, last = sorted(path.glob("_sessions/*/session.json"))  # the last two have made no record
    before = {about: about.read_text() for about in (first, sound, last)}
    for about in (first, last):
        os.truncate(about, 9)
    with storage.open_writer(path, repair=True):
        pass
    assert storage.verify_run(path) == []
    assert sound.read_text() == before[sound]
    found = {about: json.loads(about.read_text()) for about in (first, last)}
    assert all(about["rebuilt"] for about in found.values())
    assert [about["next_sequence"] for about in found.values()] == [0, 0]
    assert found[first]["versions"] == json.loads(before[first])["versions"]


def test_metadata_that_one_output_brings_back_is_there_when_others_are_read(runs, tmp_path, digests, monkeypatch):
    path = shutil.copytree(runs["fork"], tmp_path / "run")
    metadata, learner = (path / "data.zarr" / name for name in ("rollouts_0/terminated/zarr.json", "learner"))
    flip(metadata)  # comes back with the first iteration's episodes
    flip(learner / "params.float32" / "c.3.0")  # is computed from the last iteration's, which are whole
    publish = Publisher.publish

    def slowly(self, output):
        time.sleep(0.2)
        return publish(self, output)

    monkeypatch.setattr(Publisher, "publish", slowly)
    assert resume(path, repair=True, backend=SERIAL).damage == []
    assert digests(path) == digests(runs["fork"])


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ["run", "fork", "packed"])
def test_any_damaged_file_comes_back_whatever_the_damage(runs, which, tmp_path, digests):
    for relative, way in cases(runs[which]):
        check(runs[which], tmp_path, digests, relative, way)
