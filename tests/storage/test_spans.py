"""Inputs that a record names as a span: all outputs of some stages so far, in one entry however long the run is."""

import hashlib
import json
import shutil

import pytest

from metaloom import storage
from metaloom.storage import Retention, Span, StageRef
from metaloom.storage.format.files import read_sealed, render, sealed
from metaloom.storage.format.stages import OFF_POLICY
from metaloom.storage.read.history import SpanSums

ROUNDS = ("fill_memory", "collect_rollouts")


@pytest.fixture
def path(make_off_policy_run):
    return make_off_policy_run(3)


def rounds_of(iteration):
    """The rounds up to an iteration in the order of the page on the data format."""
    collected = [StageRef(i, "collect_rollouts", k) for i in range(iteration + 1) for k in range(2)]
    return [StageRef(0, "fill_memory"), *collected]


def drawn(iteration):
    return StageRef(iteration, "sample_transitions")


def problems(path):
    return {(found.iteration, found.stage): found.problem for found in storage.verify_run(path)}


def forge(path, ref, **changes):
    """Change the entries of a record's spans and make all its hashes agree."""
    file = path / "_commits" / ref.file_name
    document = read_sealed(file)
    del document["sha256"]
    for item in document["spans"]:
        item.update({name: value for name, value in changes.items() if name in item})
    file.write_bytes(render(sealed(document)))


def test_a_record_sums_up_the_outputs_of_a_span_in_one_entry(path):
    run = storage.open_run(path)
    for i in range(3):
        tasks, rounds = run.record(drawn(i)).spans
        refs = rounds_of(i)
        assert (rounds.stages, rounds.first, rounds.last) == (ROUNDS, refs[0], refs[-1])
        assert (rounds.outputs, rounds.steps) == (len(refs), sum(run.load(ref).num_steps for ref in refs))
        lines = [f"{r.iteration} {r.stage} {r.step} {run.record(r).digest}\n" for r in refs]
        assert rounds.digest == hashlib.sha256("".join(lines).encode()).hexdigest()
        assert rounds.span == Span(ROUNDS, 0, i)
        assert run.record(StageRef(i, "update")).spans == (rounds,)
        assert (tasks.first, tasks.last, tasks.outputs, tasks.steps) == (
            StageRef(0, "sample_tasks"),
            StageRef(i, "sample_tasks"),
            i + 1,
            0,
        )


def test_records_do_not_grow_with_the_run(make_off_policy_run):
    path = make_off_policy_run(12)
    sizes = [len((path / "_commits" / drawn(i).file_name).read_bytes()) for i in (1, 11)]
    assert sizes[1] - sizes[0] < 40  # digits


def test_a_longer_span_counts_only_what_has_come_since():
    counted = []
    sums = SpanSums(lambda ref: counted.append(ref) or 10)
    for i in range(20):
        for k in range(2):
            sums.add(StageRef(i, "collect_rollouts", k), f"{i} {k}")
        found = sums.of(Span(ROUNDS, 0, i))
        assert (found.outputs, found.steps) == (2 * (i + 1), 20 * (i + 1))
        assert sums.of(Span(ROUNDS, 0, i)) == found
    assert len(counted) == 40
    assert [sums.of(Span(ROUNDS, 0, i)).outputs for i in (18, 5)] == [38, 12]  # which it has to sum up anew
    sums.add(StageRef(3, "collect_rollouts", 2), "again")  # as what was lost is computed again
    assert sums.of(Span(ROUNDS, 0, 5)).outputs == 13


def test_a_record_without_spans_does_not_mention_them(path):
    documents = [json.loads(file.read_bytes()) for file in (path / "_commits").iterdir()]
    assert {d["stage"] for d in documents if "spans" in d} == {"sample_transitions", "update"}


def test_a_writer_that_resumes_sums_up_like_one_that_went_on(path, tmp_path, creation, put, make_batches):
    single = tmp_path / "single"
    batches = make_batches()
    outputs = [output for i in range(3) for output in batches.off_policy_iteration(i)]
    storage.create_run(single, capacity=3, stages=OFF_POLICY, **creation).close()
    for output in outputs:
        with storage.open_writer(single) as writer:
            put(writer, [output])
    ours, whole = storage.open_run(single), storage.open_run(path)
    assert [ours.record(ref).spans for ref in ours.refs()] == [whole.record(ref).spans for ref in whole.refs()]


def test_outputs_that_are_computed_again_are_summed_up_again(path, put, make_batches):
    whole = {ref: storage.open_run(path).record(ref).spans for ref in storage.open_run(path).refs()}
    for ref in (StageRef(1, "collect_rollouts", 1), drawn(1), StageRef(2, "collect_rollouts"), drawn(2)):
        (path / "_commits" / ref.file_name).unlink()
    batches = make_batches()
    outputs = [output for i in range(4) for output in batches.off_policy_iteration(i)]
    with storage.open_writer(path, capacity=4) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    run = storage.open_run(path)
    assert {ref: run.record(ref).spans for ref in whole} == whole
    assert run.record(drawn(3)).spans[1].outputs == 9
    assert storage.verify_run(path) == []


def test_a_span_of_which_nothing_is_stored_is_refused(path, put, batches):
    ref, batches.num_rows = drawn(3), 9
    with storage.open_writer(path, capacity=4) as writer:
        with pytest.raises(storage.StageMissing, match=r"process_samples\(i=0..3\), an input of sample_transitions"):
            put(writer, [(ref, batches.minibatches(), [Span(("process_samples",), 0, 3)])])
        put(writer, [(ref, batches.minibatches(), [Span(("adapt", "process_samples"), 0, 3)])])
    assert storage.open_run(path).record(ref).spans[0].outputs == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outputs": 4}, "was computed from 4 outputs"),
        ({"steps": 1}, "with 1 steps"),
        ({"digest": "0" * 64}, "the digest 000000000000, but the run stores"),
    ],
)
def test_a_record_that_sums_up_other_outputs_than_those_stored_is_damage(path, change, said):
    forge(path, StageRef(2, "update"), **change)
    assert said in problems(path)[2, "update"]


def test_an_output_that_was_lost_or_exchanged_is_missed_by_all_that_was_computed_from_it(path, put, make_batches):
    lost = StageRef(1, "collect_rollouts", 0)
    (path / "_commits" / lost.file_name).unlink()
    assert "5 outputs" in problems(path)[1, "sample_transitions"]
    assert "but the run stores 4 outputs" in problems(path)[1, "sample_transitions"]
    tasks = path / "_commits" / StageRef(0, "sample_tasks").file_name
    raw = tasks.read_bytes()
    tasks.unlink()
    assert problems(path)[0, "sample_transitions"].endswith("but the run stores none of these outputs")
    tasks.write_bytes(raw)
    other = make_batches(seed=1)
    with storage.open_writer(path) as writer:
        put(writer, [(lost, other.off_policy_episodes(), [])])
    found = problems(path)
    assert {(i, stage) for i in (1, 2) for stage in ("sample_transitions", "update")} <= found.keys()
    assert (0, "sample_transitions") not in found


def test_a_damaged_output_is_told_once(path):
    (chunk, *_) = (path / "data.zarr/rollouts_0/lengths").glob("c.1.*")
    raw = chunk.read_bytes()
    chunk.write_bytes(b"damaged")
    assert [found.array for found in storage.verify_run(path)] == ["rollouts_0/lengths"]
    chunk.write_bytes(raw)
    record = path / "_commits" / StageRef(1, "collect_rollouts").file_name
    record.write_bytes(b"damaged")
    assert [found.file for found in storage.verify_run(path)] == [f"_commits/{record.name}"]


@pytest.mark.parametrize(
    "changes",
    [
        {"first": {"iteration": 1, "stage": "sample_tasks", "step": 0}},
        {"last": {"iteration": -1, "stage": "collect_rollouts", "step": 0}},
        {"stages": []},
        {"outputs": None},
    ],
)
def test_an_impossible_span_is_damage_and_no_crash(path, changes):
    forge(path, drawn(1), **changes)
    assert "not a commit record" in problems(path)[1, "sample_transitions"]
    with pytest.raises(storage.DamagedRun):
        storage.open_run(path).record(drawn(1))


def test_lineage_lists_spans_beside_inputs(path):
    rows = {(row["iteration"], row["stage"]): row for row in storage.open_run(path).lineage().to_pylist()}
    assert rows[2, "sample_tasks"]["spans"] == rows[2, "sample_transitions"]["inputs"] == []
    record = storage.open_run(path).record(drawn(2))
    assert rows[2, "sample_transitions"]["spans"] == [item.as_dict() for item in record.spans]


def test_spans_outlive_thinning_and_the_parent_of_a_fork(path, tmp_path, creation, put, make_batches):
    storage.fork_run(storage.open_run(path), 2, tmp_path / "fork", capacity=3, **creation)
    batches = make_batches()
    outputs = [output for i in range(3) for output in batches.off_policy_iteration(i)]
    retention = Retention(keep_last=1)
    with storage.open_writer(tmp_path / "fork", retention=retention) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    ours, whole = storage.open_run(tmp_path / "fork"), storage.open_run(path)
    assert ours.record(drawn(2)).spans == whole.record(drawn(2)).spans
    assert ours.is_thinned(drawn(1))
    assert not any(
        ours.is_thinned(ref) for ref in ours.refs() for item in ours.record(drawn(2)).spans if ref in item.span
    )
    shutil.rmtree(path)
    assert storage.verify_run(tmp_path / "fork") == []


def test_steps_of_outputs_that_were_thinned_are_counted_from_the_table_of_episodes(make_run, put, make_batches):
    path, span, batches = make_run(2, capacity=3), Span(("collect_rollouts",), 0, 2), make_batches()
    outputs = [output for i in range(3) for output in batches.iteration(i)]
    with storage.open_writer(path) as writer:
        writer.thin([0, 1])
    with storage.open_writer(path) as writer:
        put(writer, [output for output in outputs if output[0].iteration == 2][:-1])
        ref, value, inputs = outputs[-1]
        put(writer, [(ref, value, [*inputs, span])])
    run = storage.open_run(path)
    (item,) = run.record(StageRef(2, "meta_optimize")).spans
    assert (item.outputs, item.steps) == (6, sum(run.episodes()["length"].to_pylist()))
    assert storage.verify_run(path) == []
