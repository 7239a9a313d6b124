"""Thinned arrays are gone on purpose: nothing else goes, nothing takes them for damage, and they can come back."""

import os
import shutil
from dataclasses import replace

import pytest

from metaloom import storage
from metaloom.storage import Retention, StageRef
from metaloom.storage.format.codec import flatten
from metaloom.storage.format.thinning import Thinned, marker_path, packed_marker_path
from metaloom.storage.keep.thinner import changed_versions
from metaloom.storage.write.sessions import Session
from metaloom.storage.writer import Budget

ARRAYS = ("collect_rollouts", "process_samples", "adapt")


@pytest.fixture
def thinned(make_run):
    path = make_run(3)
    with storage.open_writer(path) as writer:
        writer.thin([0, 1])
    return path


def chunks_of(path, iteration):
    run = storage.open_run(path)
    refs = [ref for ref in run.refs() if ref.iteration == iteration and ref.stage in ARRAYS]
    return [path / chunk.path for ref in refs for chunk in run.record(ref).chunks]


def test_only_arrays_that_can_be_computed_again_go(make_run, run_digests):
    path = make_run(3)
    expected, metrics = run_digests(path), storage.open_run(path).metrics()
    episodes, before = storage.open_run(path).episodes(), sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    with storage.open_writer(path) as writer:
        outcome = writer.thin([0, 1])
    after = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert (outcome.iterations, outcome.files) == ((0, 1), len(chunks_of(path, 0) + chunks_of(path, 1)))
    markers = sum(file.stat().st_size for file in (path / "_thinned").iterdir())
    session = 2000  # the writer's own, at most
    assert outcome.num_bytes - markers - session < before - after < outcome.num_bytes
    run = storage.open_run(path)
    assert run_digests(path) == expected
    assert list(run.iterations) == [0, 1, 2]
    assert run.metrics().equals(metrics)
    assert run.episodes().equals(episodes)
    for i in range(3):
        assert run[i].tasks().params.size
        assert run[i].learner().params
        assert run[i].update().metrics
    assert run.thinned_iterations() == [0, 1]
    assert [ref for ref in run.refs() if run.is_thinned(ref)] == [
        ref for ref in run.refs() if ref.stage in ARRAYS and ref.iteration < 2
    ]
    assert run[2].rollouts(1).num_steps > 0


def test_reading_what_was_thinned_names_the_command_that_brings_it_back(thinned):
    run = storage.open_run(thinned)
    readings = [
        lambda: run[0].rollouts(0),
        lambda: run[1].samples(1),
        lambda: run[0].adapted(0),
        lambda: run[0].xarray(0),
        lambda: run.steps(0),
    ]
    for read in readings:
        with pytest.raises(storage.StageThinned, match=r"was thinned.*metaloom replay .*/run@[01] --materialise"):
            read()
    assert run.steps(2).num_rows > 0


def test_a_thinned_run_is_whole_to_verify_and_to_the_next_writer(thinned, put, batches):
    assert storage.verify_run(thinned) == []
    with storage.open_writer(thinned, capacity=4) as writer:
        put(writer, batches.iteration(3))
    assert storage.verify_run(thinned) == []
    storage.open_writer(thinned, repair=True).close()
    assert len(storage.open_run(thinned).refs()) == 29


def test_an_array_that_is_missing_without_having_been_thinned_is_damage(thinned):
    chunks_of(thinned, 2)[0].unlink()
    assert len(storage.verify_run(thinned)) == 1
    with pytest.raises(storage.DamagedRun):
        storage.open_writer(thinned)


@pytest.mark.parametrize("damage", ["lost", "flipped", "of another iteration"])
def test_a_marker_that_is_lost_or_changed_is_damage_that_repair_mends(thinned, put, make_batches, damage):
    marker = marker_path(thinned, 1)
    match damage:
        case "lost":
            marker.unlink()
        case "flipped":
            marker.write_bytes(marker.read_bytes().replace(b"adapt", b"adopt"))
        case _:
            shutil.copyfile(marker_path(thinned, 0), marker)
    files = {found.file for found in storage.verify_run(thinned)}
    assert any(name.startswith("data.zarr/rollouts_0") for name in files)
    assert ("_thinned/00000001.json" in files) == (damage != "lost")
    with pytest.raises(storage.DamagedRun):
        storage.open_writer(thinned)
    again = make_batches()
    outputs = [output for i in range(3) for output in again.iteration(i)]
    with storage.open_writer(thinned, repair=True) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    assert storage.verify_run(thinned) == []
    assert storage.open_run(thinned).thinned_iterations() == [0]


def test_damaged_metadata_comes_back_with_an_output_that_is_not_thinned(thinned):
    arrays, groups = ([*thinned.glob(f"data.zarr/{inside}/zarr.json")] for inside in ("rollouts_0/*", "*"))
    for file in (*arrays, *groups):
        os.truncate(file, 9)
    before = {*storage.open_run(thinned).refs()}
    with storage.open_writer(thinned, repair=True) as writer:
        assert before - {*writer.run.refs()} == {StageRef(2, "collect_rollouts"), StageRef(2, "meta_optimize")}
        expected = [file.relative_to(thinned).as_posix() for file in (*sorted(arrays), *sorted(groups))]
        assert [line.partition(":")[0] for line in writer.repaired] == expected


@pytest.mark.parametrize("stage", ["initialize", "sample_tasks"])
def test_what_always_stays_cannot_be_called_thinned(make_run, stage):
    from metaloom.storage.format.thinning import render_marker

    path = make_run(1)
    ref = StageRef(0, stage)
    (path / "_thinned").mkdir()
    marker_path(path, 0).write_bytes(render_marker(0, {ref: storage.open_run(path).record(ref).sha256}))
    assert "cannot be thinned" in storage.verify_run(path)[0].problem


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_kill_at_any_moment_of_thinning_leaves_a_whole_run(make_run, monkeypatch, tmp_path, run_digests, distinct):
    path = make_run(2, B=1, E=1, T=2)
    expected = run_digests(path)
    (tmp_path / "moments").mkdir()
    moments = iter(range(10**6))
    for name in ("rename", "replace", "unlink", "fsync"):
        original = getattr(os, name)

        def call(*arguments, original=original, **options):
            shutil.copytree(path, tmp_path / "moments" / f"{next(moments):04d}")
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)
    with storage.open_writer(path) as writer:
        writer.thin([0])
    monkeypatch.undo()
    taken = sorted((tmp_path / "moments").iterdir())
    assert len(taken) > 60
    for moment in distinct(taken):
        assert storage.verify_run(moment) == [], moment.name
        assert run_digests(moment) == expected
    for moment in taken[::7]:
        marked = storage.open_run(moment).thinned_iterations()
        storage.open_writer(moment).close()
        assert storage.verify_run(moment) == []
        # Once it is called thinned, the next writer finishes what was begun; before, nothing has gone.
        assert {file.exists() for file in chunks_of(moment, 0)} == {not marked}


def test_arrays_come_back_only_with_the_digests_they_had(thinned, make_batches):
    again = make_batches()
    outputs = {ref: value for i in range(3) for ref, value, _ in again.iteration(i)}
    mine = {ref: value for ref, value in outputs.items() if ref.iteration == 1 and ref.stage in ARRAYS}
    first = StageRef(1, "collect_rollouts", 0)
    wrong = {**mine, first: outputs[StageRef(0, "collect_rollouts", 0)]}
    with storage.open_writer(thinned) as writer:
        message = r"values in .* that differ from the record, so nothing was stored; .* Versions: the same\. Recompute"
        with pytest.raises(storage.DigestMismatch, match=message):
            writer.restore(wrong)
        assert not any(chunk.exists() for chunk in chunks_of(thinned, 1))
        writer.restore({first: mine.pop(first)})
        assert not writer.run.is_thinned(first)
        assert writer.run.is_thinned(StageRef(1, "adapt", 0))
        writer.restore(mine)
        with pytest.raises(storage.StageExists, match="stored in full"):
            writer.restore(mine)
    run = storage.open_run(thinned)
    assert run.thinned_iterations() == [0]
    assert storage.digest(run.load(first)) == storage.digest(outputs[first])
    assert storage.verify_run(thinned) == []


def test_arrays_that_came_back_after_packing_stay_when_their_segment_is_taken_apart(thinned, make_batches):
    with storage.open_writer(thinned) as writer:
        assert writer.pack() == [range(2)]
        writer.restore({ref: value for ref, value, _ in make_batches().iteration(0) if ref.stage in ARRAYS})
    marker = packed_marker_path(thinned, range(2))
    stated = marker.read_bytes()
    os.truncate(thinned / "_segments/00000000-00000001/seal.json", 9)
    storage.open_writer(thinned, repair=True).close()
    run = storage.open_run(thinned)
    assert (run.files.segments.names(), run.thinned_iterations()) == ([], [1])
    assert all(chunk.exists() for chunk in chunks_of(thinned, 0))
    assert storage.verify_run(thinned) == []
    marker.write_bytes(stated)  # as if a power failure had brought it back
    with storage.open_writer(thinned) as writer:
        assert writer.pack() == [range(2)]
    assert storage.open_run(thinned).thinned_iterations() == [1]
    assert storage.verify_run(thinned) == []


def test_readers_that_knew_the_segments_before_a_packing_find_what_it_moved(thinned):
    first, ref = StageRef(0, "collect_rollouts"), StageRef(1, "sample_tasks")
    record = storage.open_run(thinned).record(ref)
    questions = [
        lambda run: run.refs(),
        lambda run: run.iterations,
        lambda run: run.contains(ref),
        lambda run: run.record(ref),
        lambda run: run.is_thinned(first),
        lambda run: run.thinned_iterations(),
        lambda run: run.episodes(),
        lambda run: storage.digest(run.files.read_value(record)),
    ]
    readers = [storage.open_run(thinned) for _ in questions]
    before = [ask(run) for ask, run in zip(questions, readers, strict=True)]
    with storage.open_writer(thinned) as writer:
        assert writer.pack() == [range(2)]
    assert [ask(run) for ask, run in zip(questions, readers, strict=True)] == before


def test_versions_that_changed_are_named_in_order(make_run, monkeypatch):
    record = replace(storage.open_run(make_run(1)).record(StageRef(0, "adapt")), versions={"b": "1", "h": "2"})
    monkeypatch.setattr("metaloom.storage.keep.thinner.versions", lambda: dict.fromkeys("gfedcba", "1"))
    new = [f"{name} absent then, 1 now" for name in "acdefg"]
    assert changed_versions(record) == [*new, "h 2 then, absent now"]


def test_a_compressor_that_writes_other_bytes_puts_nothing_back(thinned, make_batches, monkeypatch):
    from metaloom.storage.write import array_store

    encode = array_store.encode_chunk

    def another(data, *, compressed):
        (payload, crc), number = encode(data, compressed=compressed)
        return (payload + b"\0", crc), number

    monkeypatch.setattr(array_store, "encode_chunk", another)
    ref, value, _ = make_batches().iteration(0)[2]
    with storage.open_writer(thinned) as writer, pytest.raises(storage.DigestMismatch, match=r"compressed.*numcodecs"):
        writer.restore({ref: value})
    assert storage.verify_run(thinned) == []


def test_a_writer_that_was_taken_over_takes_nothing_away_that_came_back(thinned, make_batches, monkeypatch):
    outputs = {ref: value for ref, value, _ in make_batches().iteration(0) if ref.stage in ARRAYS}
    with storage.open_writer(thinned) as writer:
        writer.restore(outputs)
    zombie, heirs = storage.open_writer(thinned), []
    remove = Session.remove

    def taken_over_first(session, paths):
        monkeypatch.setattr(Session, "remove", remove)
        heirs.append(storage.open_writer(thinned, take_over=True))
        heirs[0].restore(outputs)
        remove(session, paths)

    monkeypatch.setattr(Session, "remove", taken_over_first)
    with pytest.raises(storage.FencedOut):
        zombie.thin([0])
    heirs[0].close()
    with pytest.raises(storage.FencedOut):
        zombie.thin([2])
    run = storage.open_run(thinned)
    assert run.thinned_iterations() == [1]
    assert run[0].rollouts(0).num_steps > 0
    assert storage.verify_run(thinned) == []


def test_a_reader_meanwhile_gets_the_data_or_is_told_that_it_was_thinned(make_run, monkeypatch):
    path = make_run(1)
    run, remove, answers = storage.open_run(path), Session.remove, []

    def watched(session, paths):
        for file in paths:
            remove(session, [file])
            try:
                answers.append(run[0].rollouts(0).num_steps > 0)
            except storage.StageThinned:
                answers.append("thinned")

    with storage.open_writer(path) as writer:
        monkeypatch.setattr(Session, "remove", watched)
        writer.thin([0])
    assert answers
    assert {*answers} <= {True, "thinned"}
    assert answers[-1] == "thinned"


@pytest.mark.parametrize(
    ("retention", "whole"),
    [
        (Retention(), [0, 1, 2, 3, 4, 5]),
        (Retention(keep_last=2), [4, 5]),
        (Retention(keep_last=0), []),
        (Retention(keep_every=3), [0, 3]),
        (Retention(keep_last=1, keep_every=2), [0, 2, 4, 5]),
    ],
)
def test_a_writer_keeps_the_iterations_that_its_retention_names(make_run, put, batches, retention, whole):
    path = make_run(1, capacity=6)
    with storage.open_writer(path, retention=retention) as writer:
        for i in range(1, 6):
            put(writer, batches.iteration(i))
    run = storage.open_run(path)
    assert [i for i in range(6) if i not in run.thinned_iterations()] == whole
    assert len(run.iterations) == 6
    assert storage.verify_run(path) == []


def test_a_run_stops_before_it_holds_more_than_its_limit_and_goes_on_after_thinning(make_run, put, batches):
    path = make_run(1, capacity=100, T=400, O=30)

    def used():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    limit = used() * 5
    retention = Retention(max_bytes=limit)
    big = type(batches)(T=400, O=30)
    outputs = [output for i in range(1, 8) for output in big.iteration(i)]
    advice = r"max_bytes.*metaloom thin .*/run --keep-every.*metaloom resume"
    with storage.open_writer(path, retention=retention) as writer:
        with pytest.raises(storage.BudgetReached, match=advice) as caught:
            put(writer, (writer.flush() or output for output in outputs))  # each once those before it are counted
        assert caught.value.found.startswith(f"{used()} bytes, and up to ")
    done = len(storage.open_run(path).iterations)
    assert 3 <= done < 6
    assert 0.5 * limit < used() <= limit
    assert storage.verify_run(path) == []
    with storage.open_writer(path) as writer:
        writer.thin(range(done))
    with storage.open_writer(path, retention=retention) as writer:
        put(writer, [output for output in big.iteration(done) if not writer.contains(output[0])])
    assert len(storage.open_run(path).iterations) == done + 1
    assert storage.verify_run(path) == []


def test_a_limit_counts_what_is_used_reserved_and_needed_to_the_byte(tmp_path, batches, caplog):
    tasks, refs = batches.tasks(), [StageRef(i, "sample_tasks") for i in range(3)]
    need = sum(array.nbytes for array in flatten(tasks).values()) + 64 * 2**10
    budget = Budget(tmp_path, 10 + 2 * need, 10)
    for ref in refs[:2]:
        budget.reserve(ref, tasks)
    with pytest.raises(storage.BudgetReached, match=f": 10 bytes, and up to {need} more"):
        budget.reserve(refs[2], tasks)
    budget.release(refs[0], -10)
    budget.reserve(refs[2], tasks)
    full = Budget(tmp_path, 1000, 0)
    full.release(refs[0], 900)
    assert caplog.text == ""
    full.release(refs[0], 1)
    full.release(refs[0], 1)
    assert caplog.text.count("holds 901 bytes, 90% of its limit") == len(caplog.records) == 1


def test_nine_tenths_of_the_limit_bring_one_warning(tmp_path, batches, caplog):
    budget, tasks = Budget(tmp_path, 10**6, used=890_000), batches.tasks()
    for i, warnings in ((0, 0), (1, 1), (2, 1)):
        ref = StageRef(i, "sample_tasks")
        budget.reserve(ref, tasks)
        budget.release(ref, 8_000)
        assert sum("% of its limit" in record.message for record in caplog.records) == warnings


def test_a_limit_together_with_thinning_is_kept_for_ever(make_run, put, batches):
    path = make_run(1, capacity=40, T=300)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    big = type(batches)(T=300)
    with storage.open_writer(path, retention=Retention(keep_last=1, max_bytes=size * 6)) as writer:
        for i in range(1, 12):
            put(writer, big.iteration(i))
            writer.flush()
    assert len(storage.open_run(path).iterations) == 12
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= size * 6


def test_a_copy_can_have_fewer_learners_and_keeps_their_metrics(make_run):
    path = make_run(5)
    before = storage.open_run(path).metrics()
    with storage.open_writer(path) as writer:
        with pytest.raises(ValueError, match="every must be at least 1, got 0"):
            writer.thin_learners(0)
        assert writer.thin_learners(1).iterations == ()
        assert writer.thin_learners(2).iterations == (0, 2)
        assert writer.thin_learners(2).iterations == ()
    assert Thinned.sum([Thinned((8,), 1, 20), Thinned((1, 8), 2, 30)]) == Thinned((1, 8), 3, 50)
    run = storage.open_run(path)
    assert [i for i in range(6) if run.is_thinned(run.learner_ref(i))] == [1, 3]
    assert run.metrics().equals(before)
    assert run[2].metrics() == dict(zip(before.column_names[1:], [*before.to_pylist()[2].values()][1:], strict=True))
    with pytest.raises(storage.StageThinned, match="materialise"):
        run[3].learner()
    assert storage.verify_run(path) == []
