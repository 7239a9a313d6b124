"""Packed iterations read like others, whoever packs, dies, forks, thins or damages them (T31)."""

import os
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr

from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise, thin
from metaloom.flows.commands.train import resume
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage import StageRef
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.segments import Segment
from metaloom.storage.write import packer

SERIAL = Backend(workers=0)
ITERATIONS = 5
LONG = 2100
"""Steps of an episode whose observations are too large to be copied into a segment."""
OLD_RUN = Path(__file__).parents[1] / "fixtures" / "metaloom-1"

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory, train_tiny):
    """A run with large and small arrays; not to be changed."""
    evaluation = {"every": 2, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 1}
    path = tmp_path_factory.mktemp("unpacked") / "run"
    return train_tiny(path, iterations=ITERATIONS, max_episode_steps=LONG, evaluation=evaluation)


@pytest.fixture(scope="module")
def packed(tmp_path_factory, unpacked):
    """The same, packed into two segments; not to be changed."""
    path = tmp_path_factory.mktemp("packed") / "run"
    shutil.copytree(unpacked, path)
    return pack(path, size=3)


@pytest.fixture
def copy(packed, tmp_path):
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def pack(path, size=500):
    with pytest.MonkeyPatch.context() as patch, storage.open_writer(path) as writer:
        patch.setattr(packer, "SIZE", size)
        writer.pack()
    return path


def segments(path):
    return sorted(folder.name for folder in path.glob("_segments/*"))


def read(path):
    """All that a run holds, as comparable data."""
    run = storage.open_run(path)
    refs = [ref for ref in run.refs() if not run.is_thinned(ref)]
    found = {str(ref): storage.output_digest(storage.digest(run.load(ref))) for ref in refs}
    tables = (run.episodes, run.tasks, run.metrics, run.evaluations)
    return found | {table.__name__: table().to_pydict() for table in tables}


def test_packed_iterations_read_like_others(packed, unpacked):
    assert segments(packed) == ["00000000-00000002", "00000003-00000003"]
    assert read(packed) == read(unpacked)
    assert storage.verify_run(packed) == []
    before, run = storage.open_run(unpacked), storage.open_run(packed)
    assert [run.record(ref) for ref in run.refs()] == [before.record(ref) for ref in before.refs()]
    assert run.steps([0, 3, 4]).equals(before.steps([0, 3, 4]))
    assert run.episodes([3, 1]).equals(before.episodes([3, 1]))
    assert run.metrics([4, 0, 2]).equals(before.metrics([4, 0, 2]))
    assert run.lineage().equals(before.lineage())
    assert run[1].xarray(1).equals(before[1].xarray(1))
    assert not [*packed.glob("_commits/0000000[0-3].*")]


def test_the_segments_used_last_stay_in_memory(packed, monkeypatch):
    run, forgotten = storage.open_run(packed), []
    monkeypatch.setattr(Segment, "forget", lambda segment: forgotten.append(segment.iterations))
    for i in (0, 3, 0, 3, 0):
        run.record(StageRef(i, "collect_rollouts"))
    assert forgotten == []


def test_plain_readers_read_segments(packed, unpacked):
    run = storage.open_run(unpacked)
    folders = [packed / "_segments" / name / "data.zarr" for name in segments(packed)]
    for group in ("rollouts_1", "tasks"):
        parts = [xr.open_zarr(folder, group=group, consolidated=False) for folder in folders]
        whole = xr.concat(parts, dim="iteration").compute()
        for i in range(ITERATIONS - 1):
            ref = StageRef(i, "sample_tasks") if group == "tasks" else StageRef(i, "collect_rollouts", 1)
            for name, (data, _) in run.files.read_arrays(run.record(ref))[group].items():
                assert np.array_equal(whole[name].to_numpy()[i], data), (group, name)
    learner = zarr.open_array(folders[1] / "learner" / "params.float32", mode="r")
    assert learner.attrs["first_row"] == 4
    expected = run.files.read_arrays(run.record(run.last_ref(3)))["learner"]["params.float32"][0]
    assert np.array_equal(learner[0], expected)
    for table in ("episodes", "metrics"):
        globs = [f"{packed}/tables/{table}/*.parquet", f"{packed}/_segments/*/tables/{table}.parquet"]
        found = duckdb.sql(f"select * from read_parquet({globs}) order by iteration").to_arrow_table()
        assert found.num_rows == getattr(run, table)().num_rows
    stage = "json_extract_string(document, '$.stage')"
    query = f"select count(*) from '{packed}/_segments/*/records.parquet' where {stage} = 'adapt'"
    assert duckdb.sql(query).fetchall() == [(ITERATIONS - 1,)]


def test_training_packs_old_iterations_and_ends_with_equal_digests(
    tmp_path, train_tiny, tiny_runs, digests, monkeypatch
):
    monkeypatch.setattr(packer, "SIZE", 2)
    monkeypatch.setattr(packer, "MARGIN", 1)
    path = train_tiny(tmp_path / "run", iterations=ITERATIONS)
    assert segments(path) == ["00000000-00000001", "00000002-00000003"]
    assert digests(path) == digests(tiny_runs(ITERATIONS))
    resume(path, iterations=ITERATIONS + 2, backend=SERIAL)
    assert segments(path)[-1] == "00000004-00000005"
    assert digests(path) == digests(tiny_runs(ITERATIONS + 2))
    assert storage.verify_run(path) == []


def test_packed_iterations_are_replayed(copy):
    assert all(outcome.identical for outcome in replay(copy, iteration=1, backend=SERIAL))


@pytest.mark.parametrize("iteration", [0, 3])
def test_forks_share_segments_and_cut_one_that_they_begin_in(packed, tmp_path, digests, iteration):
    fork(packed, iteration, tmp_path / "fork")
    expected = {name: d for name, d in digests(packed).items() if int(name[:8]) < iteration or "initialize" in name}
    assert digests(tmp_path / "fork") == expected
    assert storage.verify_run(tmp_path / "fork") == []
    resume(tmp_path / "fork", iterations=ITERATIONS, backend=SERIAL)
    assert digests(tmp_path / "fork") == digests(packed)
    pack(tmp_path / "fork")
    again = tmp_path / "again"
    fork(tmp_path / "fork", 4, again)
    assert storage.verify_run(again) == []
    resume(again, iterations=ITERATIONS, backend=SERIAL)
    assert read(again) == read(packed)
    assert storage.verify_run(again) == []


@pytest.mark.parametrize("order", ["thin, pack", "pack, thin"])
def test_packed_iterations_are_thinned_and_come_back(unpacked, tmp_path, order):
    path = shutil.copytree(unpacked, tmp_path / "run")
    expected = read(path)
    for act in order.split(", "):
        if act == "thin":
            assert thin(path, storage.Retention(keep_every=3)).iterations == (1, 2, 4)
        else:
            pack(path)
    assert storage.open_run(path).thinned_iterations() == [1, 2, 4]
    assert {*storage.open_run(path).files.live_markers()} == ({1, 2, 4} if order == "pack, thin" else {4})
    assert storage.verify_run(path) == []
    fork(path, 2, tmp_path / "fork")
    assert storage.open_run(tmp_path / "fork").thinned_iterations() == [1]
    assert storage.verify_run(tmp_path / "fork") == []
    assert {ref.iteration for ref in materialise(path, 1)} == {1}
    fork(path, 4, tmp_path / "later")
    for name, thinned in (("run", [2, 4]), ("later", [2])):
        assert storage.open_run(tmp_path / name).thinned_iterations() == thinned
        assert storage.verify_run(tmp_path / name) == []
    assert [*materialise(path)]
    assert storage.open_run(path).thinned_iterations() == []
    assert read(path) == expected
    assert thin(path, storage.Retention(keep_every=3)).iterations == (1, 2, 4)
    assert storage.verify_run(path) == []
    (name,) = segments(path)
    os.truncate(path / "_segments" / name / "seal.json", 9)
    with storage.open_writer(path, repair=True):
        pass
    assert storage.open_run(path).thinned_iterations() == [1, 2, 4]
    assert not (path / "_thinned" / f"{name}.json").exists()
    assert storage.verify_run(path) == []


def test_a_packing_that_loses_the_run_at_any_of_a_sample_of_writes_is_fenced_out(unpacked, tmp_path, write_points):
    expected = read(unpacked)
    for point in (0, 30, 130, 400, 560, 700):
        path, heirs = shutil.copytree(unpacked, tmp_path / str(point)), []
        zombie = storage.open_writer(path)

        def take_over(n, name, arguments, point=point, path=path, heirs=heirs):
            if n == point:
                heirs.append(None)  # its own writes are counted too
                heirs[0] = storage.open_writer(path, take_over=True)

        with write_points.before_each_write(take_over), pytest.raises(storage.FencedOut):
            zombie.pack()
        heirs[0].pack()
        heirs[0].close()
        assert read(path) == expected, point
        assert storage.verify_run(path) == [], point


@pytest.fixture(scope="module")
def points(tmp_path_factory, tiny_runs, write_points):
    """The number of write operations of a packing."""
    path, count = tmp_path_factory.mktemp("counted") / "run", []
    shutil.copytree(tiny_runs(3), path)
    with write_points.before_each_write(lambda n, name, arguments: count.append(name)):
        pack(path)
    return len(count)


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=[pytest.mark.sweep, pytest.mark.timeout(0)])])
def test_a_packing_killed_at_any_of_its_writes_loses_nothing_and_is_finished(
    points, tiny_runs, tmp_path, killer, digests, stride
):
    expected, path = digests(tiny_runs(3)), tmp_path / "run"
    assert points > 600
    for point in range(3, points, stride):
        shutil.copytree(tiny_runs(3), path)
        assert killer.operate("pack", path, point) == -9
        assert digests(path) == expected, f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"
        pack(path)
        assert digests(path) == expected, f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"
        assert segments(path) == ["00000000-00000001"]
        assert not [*path.glob("_commits/0000000[01].*")]
        shutil.rmtree(path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def swap(path):
    """Puts the file of the other segment in the place of one, or a copy of itself with a byte more."""
    here = {"00000000-00000001": "00000002-00000002", "00000002-00000002": "00000000-00000001"}
    parts = [here.get(part, part) for part in path.parts]
    other = Path(*parts)
    content = other.read_bytes() if other.is_file() else path.read_bytes() + b"\0"
    path.write_bytes(content if content != path.read_bytes() else content + b"\0")


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


WAYS = (flip, os.unlink, lambda path: os.truncate(path, path.stat().st_size // 2), swap, replace_by_folder)


@pytest.fixture(scope="module")
def to_damage(tmp_path_factory, tiny_runs):
    """A packed run of two segments, one of whose iterations is thinned."""
    path = shutil.copytree(tiny_runs(4), tmp_path_factory.mktemp("damaged") / "run")
    thin(path, storage.Retention(keep_every=2))
    return pack(path, size=2)


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=[pytest.mark.sweep, pytest.mark.timeout(0)])])
def test_any_damaged_file_of_a_segment_is_named_and_repaired(to_damage, tiny_runs, tmp_path, digests, stride):
    expected, path = digests(tiny_runs(4)), tmp_path / "run"
    inside = [f for f in sorted(to_damage.rglob("*")) if f.is_file() and {"_segments", "_thinned"} & {*f.parts}]
    assert len(inside) > 100
    for n, file in enumerate(inside):
        for way in WAYS if stride == 1 else WAYS[n // stride % len(WAYS) :][:1] if n % stride == 0 else ():
            shutil.copytree(to_damage, path)
            name = file.relative_to(to_damage).as_posix()
            way(path / name)
            damages = {damage.file for damage in storage.verify_run(path)}
            assert name in damages or (way is os.unlink and damages), name
            result = resume(path, repair=True, backend=SERIAL)
            assert result.repaired, name
            assert result.damage == [], name
            assert digests(path) == expected, name
            shutil.rmtree(path)


@pytest.mark.parametrize("array", ["rollouts_0/observations", "rollouts_0/rewards"], ids=["own file", "shard"])
def test_a_folder_in_place_of_a_file_with_rows_is_repaired(copy, packed, array):
    (*_, name) = sorted((copy / "_segments/00000000-00000002/data.zarr" / array).glob("c.*"))
    replace_by_folder(name)
    assert name.relative_to(copy).as_posix() in {damage.file for damage in storage.verify_run(copy)}
    assert resume(copy, repair=True, backend=SERIAL).damage == []
    assert read(copy) == read(packed)
    assert not [*copy.rglob("*.part")]


def test_a_damaged_segment_is_taken_apart_where_a_folder_is_in_the_way_of_its_files(copy, packed):
    in_the_way = [chunk.path for chunk in storage.open_run(copy).record(StageRef(0, "collect_rollouts")).chunks]
    for path in in_the_way:  # of large chunks, which are linked, and of those in shards
        (copy / path / "full").mkdir(parents=True)
    os.truncate(copy / "_segments/00000000-00000002/seal.json", 9)
    with storage.open_writer(copy, repair=True):
        pass
    assert all((copy / path).is_file() for path in in_the_way)
    assert storage.verify_run(copy) == []
    assert read(copy) == read(packed)  # before anything is computed again


def test_a_damaged_segment_of_a_fork_that_has_nothing_else_is_taken_apart(packed, tmp_path, digests):
    fork(packed, 3, tmp_path / "fork")
    assert not (tmp_path / "fork" / "tables").exists()
    seal = tmp_path / "fork" / "_segments/00000000-00000002/seal.json"
    seal.unlink()  # which the parent has too
    seal.write_text("{}")
    before = digests(packed)
    with storage.open_writer(tmp_path / "fork", repair=True):
        pass
    assert digests(tmp_path / "fork") == {ref: before[ref] for ref in before if int(ref[:8]) < 3}
    assert storage.verify_run(tmp_path / "fork") == []


def test_a_file_in_place_of_the_folder_of_markers_is_named(copy):
    (copy / "_thinned").touch()
    assert storage.open_run(copy).thinned_iterations() == []
    assert "_thinned" in {damage.file for damage in storage.verify_run(copy)}


def test_a_lost_file_that_iterations_share_is_named_once(copy):
    (shard,) = (copy / "_segments/00000000-00000002/data.zarr/rollouts_0/rewards").glob("c.*")
    shard.unlink()
    assert [str(damage) for damage in storage.verify_run(copy)] == [f"{shard.relative_to(copy)}: missing"]


def test_a_lost_seal_is_named_and_what_it_held_in_few_words(copy):
    (copy / "_segments/00000000-00000002/seal.json").unlink()
    with pytest.raises(storage.DamagedRun, match=r"00000000-00000002/seal\.json: missing"):
        storage.open_run(copy).refs()
    damages = {damage.file: damage.problem for damage in storage.verify_run(copy)}
    records = pq.read_metadata(copy / "_segments/00000000-00000002/records.parquet").num_rows
    assert f"positions 0 to {records - 1} of the history" in damages["_commits"]


def test_a_repair_says_which_part_of_the_history_it_takes_for_lost(unpacked, tmp_path):
    path = shutil.copytree(unpacked, tmp_path / "run")
    evaluation = path / "_commits" / StageRef(1, "evaluate").file_name
    position = storage.open_run(path).record(StageRef(1, "evaluate")).sequence
    evaluation.unlink()  # nothing else tells that it was there
    result = resume(path, repair=True, backend=SERIAL)
    assert any(f"_commits: the records at positions {position} of the history" in line for line in result.repaired)
    assert result.damage == []
    assert read(path) == read(unpacked)


def test_damage_of_old_iterations_does_not_stop_training(tmp_path, tiny_runs, monkeypatch, caplog):
    path = shutil.copytree(tiny_runs(3), tmp_path / "run")
    flip(next(path.glob("data.zarr/tasks/params/c.0.*")))
    monkeypatch.setattr(packer, "SIZE", 2)
    monkeypatch.setattr(packer, "MARGIN", 1)
    resume(path, iterations=4, backend=SERIAL)
    assert len(storage.open_run(path)) == 4
    assert "old iterations are not packed" in caplog.text
    with storage.open_writer(path) as writer, pytest.raises(storage.DamagedRun, match=r"c\.0"):
        writer.pack()


def test_tables_are_read_while_the_run_is_packed(tmp_path, tiny_runs, monkeypatch):
    path, read_bytes = shutil.copytree(tiny_runs(3), tmp_path / "run"), CommittedFiles.read_bytes
    expected, run = storage.open_run(path).episodes(), storage.open_run(path)

    def read_late(files, record, file):
        if files is run.files and not segments(path):
            pack(path)
        return read_bytes(files, record, file)

    monkeypatch.setattr(CommittedFiles, "read_bytes", read_late)
    assert run.episodes().equals(expected)
    assert segments(path)


def test_the_command_packs_all_but_the_newest_iteration(tmp_path, tiny_runs, capsys):
    path = shutil.copytree(tiny_runs(3), tmp_path / "run")
    assert command(["pack", str(path)]) == 0
    assert capsys.readouterr().out == "packed 2 iterations into 1 segment\n"
    assert command(["pack", str(path), "--json"]) == 0
    assert '"segments": []' in capsys.readouterr().out
    assert segments(path) == ["00000000-00000001"]


def test_runs_of_the_first_format_are_not_packed(tmp_path, capsys):
    path = shutil.copytree(OLD_RUN, tmp_path / "run")
    assert command(["pack", str(path)]) == 1
    assert "a run of format metaloom/1, which versions without support for segments can read" in capsys.readouterr().err
    assert segments(path) == []
