"""Round trips, bit for bit: from memory, from the disk, and to plain zarr."""

import json
from dataclasses import replace

import numpy as np
import pytest
import zarr

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef
from metaloom.storage.format.arrays import COMPRESS_FROM
from metaloom.storage.format.codec import as_read, flatten
from metaloom.storage.format.stages import ON_POLICY


def same(left, right) -> bool:
    a, b = flatten(left), flatten(right)
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


@pytest.fixture
def writer(tmp_path, creation):
    with storage.create_run(tmp_path / "run", capacity=3, **creation) as writer:
        yield writer


def stored(writer, put, ref, value):
    """The value as another process would read it."""
    put(writer, [(ref, value, [])])
    writer.flush()
    return storage.open_run(writer.run.path).load(ref)


def test_every_stage_output_comes_back_bit_for_bit_from_memory_and_from_disk(writer, put, batches):
    outputs = batches.iteration(0)
    put(writer, outputs)
    for ref, value, _ in outputs:
        assert same(writer.load(ref), value)
    writer.flush()
    run = storage.open_run(writer.run.path)
    for ref, value, _ in outputs:
        assert type(run.load(ref)) is type(value)
        assert same(run.load(ref), value)
        assert same(as_read(ON_POLICY, ref, value), value)
    (ref, update, _), named = outputs[-1], ["loss", "step_0.average_return"]
    assert [*as_read(ON_POLICY, ref, update).metrics] == [*run.load(ref).metrics] == named
    episodes = run[0].rollouts(0)
    assert [*episodes.behavior, *episodes.reward_terms] == ["log_std", "mean", "control", "run"]  # by name


def test_an_iteration_gives_its_batches_by_name(make_run, make_batches):
    run, again = storage.open_run(make_run(2)), make_batches()
    outputs = {ref: value for i in range(2) for ref, value, _ in again.iteration(i)}
    assert repr(run) == f"Run({str(run.path)!r}, 2 iterations)"
    assert same(run[1].tasks(), outputs[StageRef(1, "sample_tasks")])
    assert same(run[1].rollouts(1), outputs[StageRef(1, "collect_rollouts", 1)])
    assert same(run[1].rollouts(), outputs[StageRef(1, "collect_rollouts", 0)])
    assert same(run[1].output("rollouts"), outputs[StageRef(1, "collect_rollouts", 0)])
    assert same(run[1].samples(), outputs[StageRef(1, "process_samples", 0)])
    assert same(run[1].adapted(), outputs[StageRef(1, "adapt", 0)])
    assert run[1].ref("samples") == StageRef(1, "process_samples", 0)
    assert run[1].xarray().equals(run[1].xarray(0))
    assert same(run[0].learner(), outputs[StageRef(0, "initialize")].learner)
    assert same(run[1].learner(), outputs[StageRef(0, "meta_optimize")].learner)
    assert same(run[-1].update(), outputs[StageRef(1, "meta_optimize")])
    assert run[-1].metrics() == outputs[StageRef(1, "meta_optimize")].metrics


def test_task_fields_keep_their_names_and_units(make_run):
    tasks = storage.open_run(make_run(1))[0].tasks()
    assert (tasks.names, tasks.units) == (("velocity", "mass"), ("m/s", "kg"))


def test_discrete_actions_and_other_acting_distributions_come_back(writer, put, batches):
    episodes = batches.episodes()
    shape = episodes.rewards.shape
    discrete = replace(
        episodes,
        actions=np.arange(np.prod(shape)).reshape(shape),
        behavior={"logits": np.zeros((*shape, 3), np.float32)},
    )
    assert same(stored(writer, put, StageRef(0, "collect_rollouts"), discrete), discrete)


def test_samples_with_adjusted_rewards_come_back_with_them_and_others_without(writer, put, batches):
    plain = batches.samples(batches.episodes())
    assert stored(writer, put, StageRef(0, "process_samples", 0), plain).adjusted_rewards is None
    adjusted = replace(plain, adjusted_rewards=plain.returns * 2)
    assert same(stored(writer, put, StageRef(0, "process_samples", 1), adjusted), adjusted)


def test_adjusted_rewards_come_back_where_there_are_any(writer, put, batches):
    samples = batches.samples(batches.episodes())
    dice = replace(samples, adjusted_rewards=samples.returns * 2)
    assert "adjusted_rewards" in flatten(dice)
    assert same(stored(writer, put, StageRef(0, "process_samples"), dice), dice)
    assert "adjusted_rewards" not in flatten(samples)
    loaded = stored(writer, put, StageRef(0, "process_samples", 1), samples)
    assert loaded.adjusted_rewards is None
    assert same(loaded, samples)
    assert not (writer.run.path / "data.zarr" / "samples_1" / "adjusted_rewards").exists()


def test_arrays_without_entries_come_back(writer, put, batches):
    tasks = TaskBatch(np.zeros((3, 0)), np.arange(3))
    episodes = replace(batches.episodes(), initial_state=np.zeros((3, 2, 0)), reward_terms={})
    assert same(stored(writer, put, StageRef(0, "sample_tasks"), tasks), tasks)
    assert same(stored(writer, put, StageRef(0, "collect_rollouts"), episodes), episodes)
    assert zarr.open_group(writer.run.path / "data.zarr", mode="r")["tasks/params"].shape == (3, 3, 0)
    chunks = {chunk.array: chunk for chunk in writer.run.record(StageRef(0, "sample_tasks")).chunks}
    empty = chunks["tasks/params"]
    assert (empty.size, empty.crc32c, (writer.run.path / empty.path).exists()) == (0, 0, False)
    assert storage.verify_run(writer.run.path) == []


def test_broadcast_parameters_come_back_as_if_they_had_been_copied(writer, put, batches):
    broadcast = TaskParams.broadcast(batches.params(), 3)
    assert same(stored(writer, put, StageRef(0, "adapt"), broadcast), broadcast)


def test_a_learner_keeps_every_dtype_shape_and_the_order_of_its_parameters(writer, put):
    params = {name: np.zeros(3, np.float32) for name in ("z", "a", "m.kernel")}
    extra = {
        "scalar": np.array(2.5),
        "count": np.array(2**40),
        "flags": np.array([[True], [False]]),
        "small": np.array([-1, 1], np.int8),
        "none": np.zeros((0, 4), np.float32),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    }
    value = Update(LearnerState(params, {}, extra), {})
    loaded = stored(writer, put, StageRef(0, "initialize"), value)
    assert same(loaded, value)
    assert list(loaded.learner.params) == ["z", "a", "m.kernel"]


def test_nan_infinities_and_negative_zero_keep_their_bits(writer, put, batches):
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32)
    values.view(np.uint32)[0] |= 1  # a NaN with a payload
    samples = batches.samples(batches.episodes())
    odd = replace(samples, returns=np.broadcast_to(values, samples.returns.shape).copy())
    loaded = stored(writer, put, StageRef(0, "process_samples"), odd)
    assert loaded.returns.tobytes() == odd.returns.tobytes()


def test_metrics_that_are_not_finite_come_back(writer, put, batches):
    update = Update(batches.learner(), {"nan": float("nan"), "infinite": float("-inf"), "one": 1.0})
    put(writer, [(StageRef(0, "initialize"), Update(batches.learner(), {}), [])])
    metrics = stored(writer, put, StageRef(0, "meta_optimize"), update).metrics
    assert np.isnan(metrics["nan"])
    assert (metrics["infinite"], metrics["one"]) == (float("-inf"), 1.0)


def test_large_batches_are_compressed_and_come_back(tmp_path, creation, put, make_batches):
    episodes = make_batches(B=8, E=6, T=50, O=17, A=6).episodes()
    assert episodes.observations.nbytes > 2 * COMPRESS_FROM
    with storage.create_run(tmp_path / "large", capacity=1, **creation) as writer:
        assert same(stored(writer, put, StageRef(0, "collect_rollouts"), episodes), episodes)
    array = zarr.open_group(tmp_path / "large/data.zarr", mode="r")["rollouts_0/observations"]
    assert (array.shards, array.chunks) == ((1, 8, 6, 51, 17), (1, 1, 6, 51, 17))
    (sharding,) = array.metadata.codecs
    assert [type(codec).__name__ for codec in sharding.codecs] == ["BytesCodec", "BloscCodec", "Crc32cCodec"]


def test_a_batch_of_zeros_compresses_as_far_as_it_can_and_comes_back(writer, put, make_batches):
    samples = make_batches(B=40, E=20, T=100).samples(make_batches(B=40, E=20, T=100).episodes())
    zeros = replace(samples, returns=np.zeros_like(samples.returns), values=np.zeros_like(samples.values))
    assert same(stored(writer, put, StageRef(0, "process_samples"), zeros), zeros)


def test_loaded_arrays_are_writable_and_each_load_has_its_own(make_run):
    run = storage.open_run(make_run(1))
    first = run[0].rollouts(0)
    first.rewards[:] = 7
    first.behavior["mean"][:] = 7
    assert not (run[0].rollouts(0).rewards == 7).any()
    run[0].adapted(0).params["net.kernel"][:] = 0


@pytest.mark.parametrize("large", [False, True])
def test_plain_zarr_reads_the_same_numbers_without_a_warning(tmp_path, creation, put, make_batches, large):
    batches = make_batches(B=8, E=6, T=50, O=17, A=6) if large else make_batches()
    with storage.create_run(tmp_path / "run", capacity=3, **creation) as writer:
        for i in range(2):
            put(writer, batches.iteration(i))
    run, group = storage.open_run(tmp_path / "run"), zarr.open_group(tmp_path / "run" / "data.zarr", mode="r")
    for i in range(2):
        for name in ("observations", "actions", "rewards", "terminated", "truncated", "lengths", "initial_state"):
            assert (group[f"rollouts_1/{name}"][i] == getattr(run[i].rollouts(1), name)).all(), name
        assert (group["rollouts_0/behavior.log_std"][i] == run[i].rollouts(0).behavior["log_std"]).all()
        assert (group["rollouts_0/reward_terms.run"][i] == run[i].rollouts(0).reward_terms["run"]).all()
        packed = group["learner/params.float32"]
        for entry in packed.attrs["entries"]:
            stop = entry["offset"] + int(np.prod(entry["shape"]))
            part = packed[i, entry["offset"] : stop].reshape(entry["shape"])
            assert (part == run[i].learner().params[entry["name"]]).all()
    assert group["metrics/values"].attrs["names"] == ["loss", "step_0.average_return"]


def test_zarr_metadata_is_what_zarr_itself_would_write(make_run, tmp_path):
    data = make_run(1, B=8, E=6, T=50) / "data.zarr"
    for name, array in _arrays(data):
        zarr.create_array(
            tmp_path / "again" / name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=array.shards or array.chunks,
            serializer=array.serializer,
            compressors=array.compressors,
            fill_value=array.fill_value,
            dimension_names=array.metadata.dimension_names,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=dict(array.attrs),
        )
        written = json.loads((data / name / "zarr.json").read_text())
        assert json.loads((tmp_path / "again" / name / "zarr.json").read_text()) == written


def _arrays(data):
    for file in sorted(data.glob("*/*/zarr.json")):
        name = file.parent.relative_to(data).as_posix()
        yield name, zarr.open_array(data / name, mode="r")
