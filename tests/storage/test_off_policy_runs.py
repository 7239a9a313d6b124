"""A run that learns from stored transitions: its iterations end with `update`, and its episodes are its memory."""

import os
import shutil

import pytest

from metaloom import storage
from metaloom.flows.exports import format_of
from metaloom.storage import Retention, StageRef
from metaloom.storage.format.files import read_sealed, render, sealed
from metaloom.storage.format.stages import OFF_POLICY
from metaloom.storage.format.thinning import marker_path, render_marker

MEMORY = ("fill_memory", "collect_rollouts")


@pytest.fixture
def path(make_off_policy_run):
    return make_off_policy_run(3)


def chunks_of(path, *stages):
    run = storage.open_run(path)
    return [path / c.path for ref in run.refs() if ref.stage in stages for c in run.record(ref).chunks]


def test_stages_sort_in_the_order_in_which_an_iteration_computes_them(batches):
    outputs = [ref for i in range(2) for ref, _, _ in batches.off_policy_iteration(i, rounds=3)]
    assert OFF_POLICY.sort(reversed(outputs)) == outputs


def test_a_complete_iteration_ends_with_its_update(path, make_batches):
    run, batches = storage.open_run(path), make_batches()
    outputs = {ref: value for i in range(3) for ref, value, _ in batches.off_policy_iteration(i)}
    assert run.stages.last == "update"
    assert list(run.iterations) == [0, 1, 2]
    assert run.metrics()["loss"].to_pylist() == [-1.5] * 3
    assert run[1].metrics() == outputs[StageRef(1, "update")].metrics
    for ref, value in outputs.items():
        assert storage.digest(run.load(ref)) == storage.digest(value), ref
    assert (run[0].memory_fill().rewards == outputs[StageRef(0, "fill_memory")].rewards).all()
    assert (run[1].minibatches().context_rows == outputs[StageRef(1, "sample_transitions")].context_rows).all()
    assert storage.digest(run[2].learner()) == storage.digest(outputs[StageRef(1, "update")].learner)
    assert run.learner_ref(0) == StageRef(0, "initialize")
    assert run.learner_ref(3) == run.last_ref(2) == StageRef(2, "update")
    assert storage.verify_run(path) == []


def test_a_run_without_an_iteration_knows_how_its_iterations_will_end(tmp_path, creation):
    storage.create_run(tmp_path / "off", capacity=1, stages=OFF_POLICY, **creation).close()
    storage.create_run(tmp_path / "on", capacity=1, **creation).close()
    off, on = storage.open_run(tmp_path / "off"), storage.open_run(tmp_path / "on")
    assert (off.learner_ref(1), on.learner_ref(1)) == (StageRef(0, "update"), StageRef(0, "meta_optimize"))
    assert "last_stage" not in on.info  # as in runs that are older than the word


def test_a_stage_of_another_kind_of_run_is_refused(make_run, make_off_policy_run, batches, put):
    for path, ref, own in (
        (make_run(1, "on", capacity=2), StageRef(1, "update"), "meta_optimize"),
        (make_off_policy_run(1, "off", capacity=2), StageRef(1, "meta_optimize"), "update"),
    ):
        with storage.open_writer(path) as writer, pytest.raises(storage.LayoutMismatch, match=f"a stage of.*{own}"):
            put(writer, [(ref, batches.update(), [])])


def test_a_run_of_an_earlier_version_that_ends_its_iterations_in_an_unknown_way_is_not_misread(path):
    file = path / "run.json"
    info = {name: value for name, value in read_sealed(file, indented=True).items() if name != "stages"}
    file.write_bytes(render(sealed({**info, "last_stage": "distil"}), indented=True))
    with pytest.raises(storage.IncompatibleFormat, match="last_stage 'distil'; expected meta_optimize or update"):
        storage.open_run(path)


def test_steps_and_episodes_are_those_of_iterations_and_the_fill_is_on_its_own(path):
    run = storage.open_run(path)
    rounds = [run[i].rollouts(k) for i in range(3) for k in range(2)]
    assert run.steps().num_rows == sum(batch.num_steps for batch in rounds)
    assert run.episodes()["length"].to_numpy().sum() == sum(batch.num_steps for batch in rounds)
    names = run.steps().column_names
    assert {"mean", "log_stds"} <= {*names}
    # The draw of z has as many numbers as an episode can have steps, and belongs to an episode all the same.
    assert not {"latent", "return", "value", "advantage"} & {*names}
    assert run[1].xarray(1)["behavior.latent"].dims == ("task", "episode", "latent")


def test_thinning_takes_row_numbers_and_beliefs_and_leaves_the_memory(path, run_digests, make_batches):
    digests, metrics = run_digests(path), storage.open_run(path).metrics()
    with storage.open_writer(path) as writer:
        outcome = writer.thin([0, 1])
    run = storage.open_run(path)
    gone = [ref for ref in run.refs() if run.is_thinned(ref)]
    assert gone == [StageRef(i, stage) for i in (0, 1) for stage in ("adapt", "sample_transitions")]
    assert gone == run.thinnable([0, 1])
    assert outcome.files == sum(len(run.record(ref).chunks) for ref in gone)
    assert all(chunk.exists() for chunk in chunks_of(path, *MEMORY))
    with pytest.raises(storage.StageThinned, match=r"sample_transitions.*metaloom replay .*/run@0 --materialise"):
        run[0].transitions()
    assert run[2].transitions().num_rows == 12
    assert run.transitions(range(50)).num_rows == 50
    assert run_digests(path) == digests
    assert run.metrics().equals(metrics)
    assert storage.verify_run(path) == []
    batches = make_batches()
    outputs = {ref: value for i in range(3) for ref, value, _ in batches.off_policy_iteration(i)}
    with storage.open_writer(path) as writer:
        for i in (0, 1):
            writer.restore({ref: outputs[ref] for ref in gone if ref.iteration == i})
    assert storage.open_run(path).thinned_iterations() == []
    assert storage.open_run(path)[0].transitions().num_rows == 12
    assert storage.verify_run(path) == []


@pytest.mark.parametrize(
    ("retention", "whole"), [(Retention(keep_last=1), [2]), (Retention(keep_every=2), [0, 2]), (Retention(), [0, 1, 2])]
)
def test_retention_thins_row_numbers_only(make_off_policy_run, retention, whole):
    path = make_off_policy_run(3, retention=retention)
    run = storage.open_run(path)
    assert [i for i in range(3) if i not in run.thinned_iterations()] == whole
    assert {ref.stage for ref in run.refs() if run.is_thinned(ref)} <= {"adapt", "sample_transitions"}
    assert all(chunk.exists() for chunk in chunks_of(path, *MEMORY))
    assert storage.verify_run(path) == []


@pytest.mark.parametrize("stage", MEMORY)
def test_the_memory_cannot_be_called_thinned(path, stage):
    ref = StageRef(0, stage)
    (path / "_thinned").mkdir()
    marker_path(path, 0).write_bytes(render_marker(0, {ref: storage.open_run(path).record(ref).sha256}))
    assert any("cannot be thinned" in found.problem for found in storage.verify_run(path))
    with pytest.raises(storage.DamagedRun, match="cannot be thinned"):
        storage.open_writer(path)


@pytest.mark.parametrize(
    "array", ["memory_fill/rewards", "rollouts_1/observations", "minibatches/rows", "minibatches/context_rows"]
)
def test_a_flipped_bit_is_found_and_repair_has_it_computed_again(path, make_batches, put, run_digests, array):
    expected = run_digests(path)
    (chunk,) = (path / "data.zarr" / array).glob("c.0.*")
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 1
    chunk.write_bytes(raw)
    (found,) = storage.verify_run(path)
    assert (found.iteration, found.array) == (0, array)
    batches = make_batches()
    outputs = [output for i in range(3) for output in batches.off_policy_iteration(i)]
    with storage.open_writer(path, repair=True) as writer:
        missing = [output for output in outputs if not writer.contains(output[0])]
        assert [ref for ref, _, _ in missing] == [StageRef(0, found.stage, found.step), StageRef(0, "update")]
        put(writer, missing)
    assert run_digests(path) == expected
    assert storage.verify_run(path) == []


def test_a_lost_run_json_is_all_that_is_wrong_with_the_rest(path):
    with storage.open_writer(path) as writer:
        writer.thin([0])
    (path / "run.json").unlink()
    assert [found.file for found in storage.verify_run(path)] == ["run.json"]


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_a_fork_takes_the_memory_over_and_goes_on_with_it(path, tmp_path, creation, make_batches, put, iteration):
    parent = storage.open_run(path)
    with storage.open_writer(path) as writer:
        writer.thin([0])
    storage.fork_run(parent, iteration, tmp_path / "fork", capacity=4, **creation)
    run = storage.open_run(tmp_path / "fork")
    assert run.stages.last == "update"
    assert len(run.iterations) == iteration
    assert run.contains(StageRef(0, "fill_memory")) == (iteration > 0)
    assert run.thinned_iterations() == [0][:iteration]
    batches = make_batches()
    outputs = [output for i in range(iteration + 1) for output in batches.off_policy_iteration(i)]
    with storage.open_writer(run.path) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    shutil.rmtree(path)
    assert len(run.iterations) == iteration + 1
    assert run[iteration].transitions().num_rows == 12
    assert storage.verify_run(run.path) == []


def test_a_run_stops_before_it_holds_more_than_its_limit(path, put, make_batches):
    held = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    batches = make_batches()
    outputs = [output for i in range(4) for output in batches.off_policy_iteration(i)]
    limit = Retention(max_bytes=held + 70_000)
    with pytest.raises(storage.BudgetReached), storage.open_writer(path, capacity=4, retention=limit) as writer:
        put(writer, [output for output in outputs if not writer.contains(output[0])])
    assert storage.verify_run(path) == []
    assert len(storage.open_run(path).iterations) == 3


def test_exports_hold_the_episodes_of_iterations(path, tmp_path):
    run = storage.open_run(path)
    done = format_of("parquet").export(run, tmp_path / "parquet")
    assert done.rows == run.steps().num_rows
    assert format_of("histories").export(run, tmp_path / "histories").rows == run.episodes().num_rows


@pytest.mark.slow
def test_at_every_write_the_disk_holds_a_whole_run_that_can_be_finished(
    tmp_path, creation, put, make_batches, monkeypatch, run_digests
):
    batches = make_batches(B=1, E=1, T=2, O=1, A=1)
    outputs = [output for i in range(2) for output in batches.off_policy_iteration(i, rounds=2)]
    path, snapshots = tmp_path / "run", tmp_path / "snapshots"
    snapshots.mkdir()
    numbers = iter(range(10**6))
    with storage.create_run(path, capacity=2, retention=Retention(keep_last=1), stages=OFF_POLICY, **creation) as w:
        for name in ("replace", "link", "unlink"):
            original = getattr(os, name)

            def call(*arguments, original=original, **options):
                shutil.copytree(path, snapshots / f"{next(numbers):04d}")
                return original(*arguments, **options)

            monkeypatch.setattr(os, name, call)
        put(w, outputs)
    monkeypatch.undo()
    expected, taken = run_digests(path), sorted(snapshots.iterdir())
    assert len(taken) > 60
    for snapshot in taken:
        assert storage.verify_run(snapshot) == [], snapshot.name
        assert run_digests(snapshot).items() <= expected.items()
    for snapshot in taken[::15]:
        with storage.open_writer(snapshot) as writer:
            put(writer, [output for output in outputs if not writer.contains(output[0])])
        assert run_digests(snapshot) == expected
        assert storage.verify_run(snapshot) == []
