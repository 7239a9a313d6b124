"""Verification names every damaged, missing and foreign file, and nothing else."""

import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.results.checks import what_helps
from metaloom.storage import StageRef
from metaloom.storage.format.records import read_record


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 0x20
    file.write_bytes(bytes(data))


def test_an_intact_run_has_no_damage_while_it_is_written_and_afterwards(make_run, put, batches):
    path = make_run(2, capacity=3)
    assert storage.verify_run(path) == []
    with storage.open_writer(path) as writer:
        put(writer, batches.iteration(2)[:3])
        writer.flush()
        assert storage.verify_run(path) == []
        record = path / "_commits" / StageRef(2, "collect_rollouts").file_name  # the newest but one
        raw = record.read_bytes()
        record.unlink()
        assert "the records at positions 16 of the history are missing" in [d.problem for d in storage.verify_run(path)]
        record.write_bytes(raw)
    assert storage.verify_run(path) == []


def test_a_run_without_outputs_misses_no_records(tmp_path, creation):
    path = tmp_path / "run"
    storage.create_run(path, capacity=1, **creation).close()
    assert storage.verify_run(path) == []
    shutil.rmtree(path / "_sessions")
    assert [str(damage) for damage in storage.verify_run(path)] == ["_sessions: missing"]


def test_who_opens_a_run_is_warned_of_a_newest_record_that_is_missing_and_of_nothing_else(make_run, caplog):
    path, newest = make_run(2), StageRef(1, "meta_optimize")
    storage.open_run(path)
    assert caplog.messages == []
    (path / "_commits" / newest.file_name).unlink()
    storage.open_run(path)
    (message,) = caplog.messages
    assert f"its newest record, of {newest} at position" in message
    with storage.open_writer(path) as writer:  # from now on the record is known to be lost
        assert not writer.contains(newest)
    caplog.clear()
    storage.open_run(path)
    assert caplog.messages == []


def rotating(choices, n, *, every):
    """All of the choices, or only the one whose turn it is at the n-th file."""
    return choices if every else [choices[n % len(choices)]]


one_or_every = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["sample", "all"]
)


@pytest.mark.slow
@pytest.mark.no_cover
@one_or_every
def test_a_flipped_byte_in_any_file_is_reported_with_the_file_its_iteration_stage_and_array(make_run, every):
    path = make_run(2, B=2, E=1, T=3)
    files = [file for file in files_of(path) if file.stat().st_size]
    assert len(files) > 80
    rng = np.random.default_rng(0)
    for n, file in enumerate(files):
        original = file.read_bytes()
        for position in rotating([0, len(original) - 1, int(rng.integers(len(original)))], n, every=every):
            flip(file, position)
            relative = file.relative_to(path).as_posix()
            named = [damage for damage in storage.verify_run(path) if damage.file == relative]
            assert named, f"byte {position} of {relative}"
            _check_names(relative, named[0])
            file.write_bytes(original)
    assert storage.verify_run(path) == []


def _check_names(relative, damage):
    parts = relative.split("/")
    if parts[0] == "_commits":
        ref = StageRef.from_file_name(parts[1])
        assert (damage.iteration, damage.stage, damage.step) == (ref.iteration, ref.stage, ref.step)
    if parts[0] == "data.zarr" and parts[-1].startswith("c."):
        assert damage.array == f"{parts[1]}/{parts[2]}"
        assert damage.stage is not None
        row = int(parts[-1].split(".")[1])
        learner = parts[1] == "learner"
        assert damage.iteration == (max(row - 1, 0) if learner else row)
    if parts[0] == "tables":
        assert (damage.iteration, damage.stage) == (int(parts[-1].removesuffix(".parquet")), "meta_optimize")


@pytest.mark.slow
@pytest.mark.no_cover
@one_or_every
def test_a_file_cut_short_emptied_or_lengthened_is_reported(make_run, every):
    path = make_run(1, B=2, E=1, T=3)
    for n, file in enumerate(files_of(path)):
        original = file.read_bytes()
        if not original:
            continue
        changes = [original[:-1], original[: len(original) // 2], b"", original + b"\0"]
        for content in rotating(changes, n, every=every):
            file.write_bytes(content)
            reported = {damage.file for damage in storage.verify_run(path)}
            assert file.relative_to(path).as_posix() in reported
        file.write_bytes(original)


def test_a_missing_file_is_reported(make_run):
    path = make_run(2, B=2, E=1, T=3)
    for file in files_of(path):
        relative = file.relative_to(path).as_posix()
        if re.fullmatch(r"writer\.lock|_sessions/(\d+\.claim|.*/run\.json)", relative):  # not needed
            continue
        content = file.read_bytes()
        file.unlink()
        assert storage.verify_run(path), relative
        file.write_bytes(content)
    assert storage.verify_run(path) == []


def test_a_document_that_says_the_same_in_other_bytes_is_reported(make_run):
    path = make_run(1)
    for name in ("run.json", "data.zarr/rollouts_0/rewards/zarr.json", f"_commits/{StageRef(0, 'adapt').file_name}"):
        original = (path / name).read_bytes()
        (path / name).write_text(json.dumps(json.loads(original), sort_keys=True, indent=3))
        assert name in {damage.file for damage in storage.verify_run(path)}
        (path / name).write_bytes(original)


def test_chunks_that_changed_places_are_reported(make_run):
    path = make_run(2)
    rewards = path / "data.zarr/rollouts_0/rewards"
    shutil.move(rewards / "c.0.0.0.0", rewards / "other")
    shutil.move(rewards / "c.1.0.0.0", rewards / "c.0.0.0.0")
    shutil.move(rewards / "other", rewards / "c.1.0.0.0")
    damaged = {(damage.iteration, damage.array) for damage in storage.verify_run(path)}
    assert damaged == {(0, "rollouts_0/rewards"), (1, "rollouts_0/rewards")}


def test_records_of_another_run_are_reported(make_run):
    path, other = make_run(2), make_run(2, name="other", seed=1)
    name = StageRef(1, "process_samples").file_name
    shutil.copyfile(other / "_commits" / name, path / "_commits" / name)
    damages = storage.verify_run(path)
    assert any(damage.file == f"_commits/{name}" for damage in damages)
    found = "was computed from another process_samples(i=1, k=0) than the one stored"
    assert [damage.stage for damage in damages if damage.problem == found] == ["adapt", "meta_optimize"]


def test_a_record_that_is_lost_is_missed_by_what_was_computed_from_it_and_a_damaged_one_is_not(make_run):
    path = make_run(2)
    record = path / "_commits" / StageRef(1, "process_samples").file_name
    os.truncate(record, 9)
    assert [damage.file for damage in storage.verify_run(path)] == [f"_commits/{record.name}"]
    record.unlink()
    assert [(damage.stage, damage.problem) for damage in storage.verify_run(path)] == [
        (None, "the records at positions 10 of the history are missing"),
        ("adapt", "its input process_samples(i=1, k=0) is not stored"),
        ("meta_optimize", "its input process_samples(i=1, k=0) is not stored"),
    ]


def test_damage_is_listed_by_iteration_stage_and_file(make_run):
    path = make_run(2)
    run = storage.open_run(path)
    places = [(1, "meta_optimize", "learner/"), (1, "collect_rollouts", ""), (0, "sample_tasks", "")]
    for i, stage, array in places:
        flip(path / next(c.path for c in run.record(StageRef(i, stage)).chunks if c.array.startswith(array)), 0)
    (path / "notes.txt").touch()
    found = [(damage.iteration, damage.stage) for damage in storage.verify_run(path)]
    assert found == [(None, None), (0, "sample_tasks"), (1, "collect_rollouts"), (1, "meta_optimize")]


def test_a_record_with_another_predecessor_is_reported_and_not_written_behind(make_run):
    path = make_run(1)
    name = StageRef(0, "meta_optimize").file_name  # the newest: no later record contradicts it
    record = read_record(path / "_commits" / name)
    (path / "_commits" / name).write_bytes(replace(record, previous="0" * 64).with_hash().content())
    problems = {(damage.file, damage.problem) for damage in storage.verify_run(path)}
    assert problems == {
        (f"_commits/{name}", "does not follow the record before it"),
        (f"_commits/{name}", "not the record that session 0 knew at its position"),
    }
    with pytest.raises(storage.DamagedRun, match=r"does not follow the record before it.*from a copy"):
        storage.open_writer(path)
    (path / "_commits" / name).write_bytes(replace(record, sequence=record.sequence - 1).with_hash().content())
    found = "has position 6 in the history, which another record also has"
    assert (f"_commits/{name}", found) in {(damage.file, damage.problem) for damage in storage.verify_run(path)}


def test_files_that_do_not_belong_to_a_run_are_reported(make_run):
    path = make_run(1)
    (session,) = path.glob("_sessions/*.closed")
    refs = storage.open_run(path).refs()
    strangers = [
        "notes.txt",
        "data.zarr/rollouts_0/notes.txt",
        "_commits/x.json",
        f"_commits/{StageRef(0, 'dream').file_name}",
        "_segments/notes/seal.json",
        f"_sessions/{session.name}/notes.txt",
        f"_sessions/{session.name}/notes/x",
        "tables/episodes/notes.parquet",
        "tables/other/00000000.parquet",
    ]
    for name in strangers:
        (path / name).parent.mkdir(exist_ok=True, parents=True)
        (path / name).write_text("mine")
    os.symlink("/etc/hostname", path / "link")
    os.symlink("/etc", path / "data.zarr" / "folder")
    reported = [damage.file for damage in storage.verify_run(path)]
    assert reported == sorted([*strangers, "link", "data.zarr/folder"])
    run = storage.open_run(path)
    assert run.refs() == refs
    assert {"link", "data.zarr/folder"} == {name for name in run.files.sizes() if re.search(r"^link|/folder", name)}


def test_a_link_in_place_of_a_file_is_reported_and_not_followed(make_run):
    path = make_run(1)
    chunk = path / "data.zarr/rollouts_0/rewards/c.0.0.0.0"
    shutil.move(chunk, path.parent / "elsewhere")
    chunk.symlink_to(path.parent / "elsewhere")
    problems = [damage.problem for damage in storage.verify_run(path) if damage.file.endswith("c.0.0.0.0")]
    assert any("symbolic link" in problem for problem in problems)
    run, size = storage.open_run(path), chunk.lstat().st_size
    with pytest.raises(storage.DamagedRun, match="symbolic link"):
        run[0].rollouts(0)
    assert run.files.sizes()["data.zarr/rollouts_0/rewards/c.0.0.0.0"] == size
    with pytest.raises(storage.DamagedRun, match=f"holds {size} bytes, but "):
        storage.open_writer(path)


@pytest.mark.parametrize("linked", ["files", "folders"])
def test_a_run_of_links_is_no_damage_to_mend_and_a_copy_of_what_they_lead_to_is_a_run(make_run, tmp_path, linked):
    path, links = make_run(1), tmp_path / "links"
    if linked == "files":
        shutil.copytree(path, links, copy_function=os.symlink)
    else:
        links.mkdir()
        for entry in path.iterdir():
            (links / entry.name).symlink_to(entry)
    for refuse in (storage.open_run, storage.open_writer, lambda path: storage.open_writer(path, repair=True)):
        with pytest.raises(storage.DamagedRun, match=rf"a symbolic link; .*`cp -rL {links} COPY`"):
            refuse(links)
    damages = storage.verify_run(links)
    assert any(damage.is_link and damage.file == "run.json" for damage in damages)
    assert not any("--repair" in line for line in what_helps(links, damages))
    assert any(f"cp -rL {links} COPY" in line for line in what_helps(links, damages))
    shutil.copytree(links, tmp_path / "copy")  # follows links
    assert storage.verify_run(tmp_path / "copy") == []


def test_reading_damaged_data_raises_and_names_the_file(make_run):
    path = make_run(1)
    run = storage.open_run(path)
    flip(path / "data.zarr/samples_0/returns/c.0.0.0.0", 5)
    flip(path / "tables/episodes/00000000.parquet", 50)
    with pytest.raises(storage.DamagedRun, match="samples_0/returns"):
        run[0].samples(0)
    with pytest.raises(storage.DamagedRun, match="samples_0/returns"):
        run[0].xarray(0)
    with pytest.raises(storage.DamagedRun, match="samples_0/returns"):
        run.steps(columns=["return"])
    assert run.steps(columns=["reward"]).num_rows > 0
    with pytest.raises(storage.DamagedRun, match=r"episodes/00000000\.parquet"):
        run.episodes()


def test_a_run_without_run_json_is_damaged_but_other_folders_are_no_runs(make_run, tmp_path):
    path = make_run(1)
    (path / "run.json").unlink()
    assert [damage.file for damage in storage.verify_run(path)] == ["run.json"]
    (path / "_commits" / StageRef(0, "meta_optimize").file_name).unlink()
    assert [damage.file for damage in storage.verify_run(path)] == ["_commits", "run.json"]
    with pytest.raises(storage.NotARun):
        storage.verify_run(tmp_path)
    with pytest.raises(storage.RunNotFound):
        storage.verify_run(tmp_path / "nothing")


@pytest.mark.parametrize("folder", ["_commits", "_sessions", "data.zarr", "data.zarr/learner", "tables"])
def test_a_missing_folder_is_reported(make_run, folder):
    path = make_run(1)
    shutil.rmtree(path / folder)
    assert any(damage.file.startswith(folder) for damage in storage.verify_run(path))


def test_missing_sessions_are_reported_from_the_first_to_the_last(make_run, put, batches):
    path = make_run(1, capacity=6)
    for i in range(1, 6):
        with storage.open_writer(path) as writer:
            put(writer, [(StageRef(i, "sample_tasks"), batches.tasks(), [])])
    tokens = [folder.name[7:23] for folder in sorted(path.glob("_sessions/*.closed"))]
    for folder in path.glob("_sessions/*.closed"):
        shutil.rmtree(folder)
    missing = [damage.problem for damage in storage.verify_run(path) if damage.file == "_sessions"]
    assert missing == [f"the session {token}, which published records, is missing" for token in tokens]


def test_damage_reads_as_a_sentence_with_run_file_iteration_stage_and_array(make_run):
    path = make_run(2)
    flip(path / "data.zarr/rollouts_1/actions/c.1.0.0.0.0", 9)
    (damage,) = storage.verify_run(path)
    assert str(damage) == (
        "data.zarr/rollouts_1/actions/c.1.0.0.0.0 (iteration 1 collect_rollouts step 1, rollouts_1/actions): "
        "its CRC-32C differs from the committed one"
    )
    metadata = path / "data.zarr/rollouts_1/actions/zarr.json"
    os.truncate(metadata, 9)  # which all iterations share
    assert [damage.file for damage in storage.verify_run(path)] == ["data.zarr/rollouts_1/actions/zarr.json"]


@pytest.mark.parametrize("count", [1, 3])
def test_newest_records_that_were_taken_away_are_missed_by_all_and_computed_again(
    make_run, put, make_batches, run_digests, caplog, count
):
    path = make_run(2)
    expected, run = run_digests(path), storage.open_run(path)
    assert run.is_sealed
    newest = sorted(run.refs(), key=lambda ref: run.record(ref).sequence)[-count:]
    first, last = (run.record(ref).sequence for ref in (newest[0], newest[-1]))
    for ref in newest:
        run.files.record_path(ref).unlink()
    (damage,) = storage.verify_run(path)
    positions = f"{first} to {last}" if count > 1 else f"{last}"
    about = f"records at positions {positions} of the history are missing; the newest that session 0 knew of is"
    assert f"{about} meta_optimize(i=1" in str(damage)
    storage.open_run(path)
    assert "its newest record, of meta_optimize(i=1, k=0) at position" in caplog.text
    again = make_batches()
    outputs = [output for i in range(2) for output in again.iteration(i)]
    with storage.open_writer(path) as writer:
        assert "they will be recomputed" in caplog.text
        missing = [output for output in outputs if not writer.contains(output[0])]
        put(writer, missing)
    assert [ref for ref, _, _ in missing] == newest
    assert run_digests(path) == expected
    assert storage.verify_run(path) == []
    caplog.clear()
    storage.open_run(path)
    storage.open_writer(path).close()
    assert caplog.text == ""
