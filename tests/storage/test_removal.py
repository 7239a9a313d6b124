"""Only a run that nobody writes is removed, and nothing but a run."""

import os

import pytest

from metaloom import storage
from metaloom.storage.keep.removal import REMOVED, check_removable, remove_run, unfinished_removals


def test_a_run_is_removed_whole(make_run):
    path = make_run(1)
    assert check_removable(path) == path
    remove_run(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_damaged_run_can_be_removed(make_run, damage):
    path = make_run(1)
    (path / "run.json").unlink() if damage == "lost" else (path / "run.json").write_text("{}")
    remove_run(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", storage.RunNotFound),
        ("file", storage.RunNotFound),
        ("empty", storage.NotARun),
        ("own", storage.NotARun),
    ],
)
def test_what_is_no_run_is_not_removed(tmp_path, name, error):
    for folder in ("empty", "own"):
        (tmp_path / folder).mkdir()
    for file in ("file", "own/thesis.txt"):
        (tmp_path / file).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=rf"{name}: (no such folder|a folder without run\.json)"):
        remove_run(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_run_is_not_removed(make_run):
    path = make_run(1)
    link = path.parent / "link"
    link.symlink_to(path)
    with pytest.raises(storage.NotARun, match=f"link: a symbolic link to {path}; expected the folder of a run itself"):
        remove_run(link)
    assert storage.verify_run(path) == []


@pytest.mark.parametrize("name", ["notes.txt", "data.zarr/notes.txt", "_commits/notes.txt", "own/notes.txt"])
def test_a_run_with_files_of_somebody_is_not_removed(make_run, name):
    path = make_run(1)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    with pytest.raises(storage.NotARun, match=f"{name.removesuffix('/notes.txt') if 'own' in name else name} in it"):
        remove_run(path)
    assert (path / name).read_text() == "mine"
    more = [name.replace("notes.txt", letter) for letter in "adcb"]
    for file in more:
        (path / file).write_text("mine")
    if "own" not in name:
        with pytest.raises(storage.NotARun, match=f": {', '.join(sorted(more)[:3])} in it"):
            remove_run(path)


def test_a_run_that_is_written_is_not_removed(make_run, monkeypatch):
    path = make_run(1)
    with storage.open_writer(path):
        with pytest.raises(storage.RunLocked, match=rf"process {os.getpid()} on .* is writing it; .*metaloom cancel"):
            remove_run(path)
        with monkeypatch.context() as late:
            late.setattr("metaloom.storage.keep.removal.current_writer", lambda path: None)
            with pytest.raises(storage.RunLocked, match="has been writing it since"):
                remove_run(path)
        assert path.is_dir()
    remove_run(path)


def test_runs_are_not_moved_through_a_link_to_be_removed(make_run, tmp_path):
    path = make_run(1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / REMOVED).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(storage.DamagedRun, match=f"{REMOVED}: a symbolic link"):
        remove_run(path)
    assert os.listdir(tmp_path / "elsewhere") == []
    assert unfinished_removals(tmp_path) == []
    assert storage.verify_run(path) == []
    storage.open_writer(path).close()  # nothing holds its lock
