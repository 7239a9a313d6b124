"""A power cut after every file operation, with everything that was not synced dropped or torn (T2)."""

import itertools
import shutil

import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume
from metaloom.flows.rollouts.workers import Backend

STRIDE = 47  # a prime, so that the sample meets every kind of operation


@pytest.fixture(scope="session")
def power_loss(load_module):
    return load_module("power_loss")


@pytest.fixture(scope="module")
def disk(tmp_path_factory, power_loss, write_points, train_tiny):
    """The operations of a run of one iteration that is then resumed for one more."""
    folder = tmp_path_factory.mktemp("recorded")
    disk = power_loss.Disk(folder / "run")
    with disk.recording(write_points):
        train_tiny(folder / "run", iterations=1)
        resume(folder / "run", iterations=2, backend=Backend(workers=0))
    return disk


def test_the_page_says_how_many_power_cuts_are_tried(disk, on_page):
    tried = on_page("after each of the NUMBER file operations of a resumed run; .* every NUMBERth ")
    assert tried == [pytest.approx(len(disk.operations), rel=0.05), STRIDE]


@pytest.fixture
def check(tmp_path, disk, power_loss, finish, digests):
    expected = digests(disk.root)
    seen = set()

    def survives(length, adversary, *, resumed):
        content = disk.after_power_cut(length, adversary)
        state = (hash(tuple(content.items())), resumed)
        if state in seen:
            return
        seen.add(state)
        path = tmp_path / "run"
        power_loss.build(content, path)
        about = f"after {length} operations, {adversary}"
        must_be_there = {name for name in expected if disk.safe(length, "_commits", name)}
        if "run.json" in content:
            found = digests(path)
            assert storage.verify_run(path) == [], about
            assert must_be_there <= found.keys(), about
            assert found.items() <= expected.items(), about
        else:
            assert not must_be_there, about
        if resumed:
            finish(path, iterations=1)
            assert digests(path).items() <= expected.items(), about
            assert storage.verify_run(path) == [], about
        shutil.rmtree(path)

    return survives


def test_the_recorded_operations_rebuild_the_run_that_is_there(disk):
    there = {str(file.relative_to(disk.root)): file for file in disk.root.rglob("*")}
    content = disk.after_power_cut(len(disk.operations), "everything")
    expected = {path: None if file.is_dir() else file.read_bytes() for path, file in there.items()}
    # `_operator` is no part of the run: nobody records what is written there.
    found, wanted = (
        {path: data for path, data in files.items() if not path.startswith("_operator")}
        for files in (content, expected)
    )
    assert found == wanted


@pytest.mark.slow
@pytest.mark.no_cover
def test_after_a_power_cut_the_reader_sees_the_old_or_the_new_commit(disk, check, power_loss):
    assert len(disk.operations) > 500
    for length in range(0, len(disk.operations) + 1, STRIDE):
        for adversary in power_loss.ADVERSARIES:
            check(length, adversary, resumed=False)


@pytest.mark.slow
@pytest.mark.no_cover
def test_after_a_power_cut_a_run_resumes_to_equal_digests(disk, check, power_loss):
    adversaries = itertools.cycle(power_loss.ADVERSARIES)
    for length in range(0, len(disk.operations) + 1, 2 * STRIDE):
        check(length, next(adversaries), resumed=True)


@pytest.mark.sweep
@pytest.mark.timeout(0)
def test_after_a_power_cut_at_every_operation_the_reader_sees_the_old_or_the_new_commit(disk, check, power_loss):
    for length, adversary in itertools.product(range(len(disk.operations) + 1), power_loss.ADVERSARIES):
        check(length, adversary, resumed=False)


@pytest.mark.sweep
@pytest.mark.timeout(0)
def test_after_a_power_cut_at_every_operation_a_run_resumes_to_equal_digests(disk, check, power_loss):
    adversaries = itertools.cycle(power_loss.ADVERSARIES)
    for length in range(len(disk.operations) + 1):
        check(length, next(adversaries), resumed=True)


def test_a_group_that_a_power_cut_took_away_from_its_arrays_comes_back(tmp_path, train_tiny, finish):
    path = train_tiny(tmp_path / "run", iterations=1)
    (path / "data.zarr/tasks/zarr.json").unlink()
    assert [damage.file for damage in storage.verify_run(path)] == ["data.zarr/tasks/zarr.json"]
    finish(path)
    assert storage.verify_run(path) == []


def test_the_model_notices_a_commit_that_is_not_synced(tmp_path, power_loss, write_points, train_tiny, monkeypatch):
    disk = power_loss.Disk(tmp_path / "run")
    with disk.recording(write_points), monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        train_tiny(tmp_path / "run", iterations=1)
    content = disk.after_power_cut(len(disk.operations), "names")
    assert any(data == b"" for path, data in content.items() if path.startswith("_commits/"))
