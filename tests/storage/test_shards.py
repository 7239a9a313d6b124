"""Large arrays lie in shards with a part per task: what is read of them, and what of their damage is found."""

import os
import shutil
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.arrays import COMPRESS_FROM, SMALLEST_PART
from metaloom.storage.format.codec import flatten
from metaloom.storage.read.outputs import places

SIZES = {"B": 8, "E": 6, "T": 50, "O": 17, "A": 6}
OBSERVATIONS = "data.zarr/rollouts_0/observations/c.0.0.0.0.0"
TAIL = 20 * SIZES["B"] + 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory, put, make_batches, creation):
    """A run of two iterations whose observations do not compress: all their parts have one size."""
    path = tmp_path_factory.mktemp("shards") / "run"
    batches = make_batches(**SIZES)
    with storage.create_run(path, capacity=2, **creation) as writer:
        for i in range(2):
            put(writer, [(ref, _noise(value, i), inputs) for ref, value, inputs in batches.iteration(i)])
    return path


def _noise(value, seed):
    if not hasattr(value, "observations"):
        return value
    bits = np.random.default_rng(seed).integers(0, 2**32, value.observations.shape, np.uint32)
    noise = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(0.5))
    return replace(value, observations=noise)


@pytest.fixture
def run(stored, tmp_path):
    return storage.open_run(shutil.copytree(stored, tmp_path / "run"))


def test_only_large_rows_of_several_tasks_are_shards(run):
    for ref in run.refs():
        for chunk in run.record(ref).chunks:
            spec = run.files.spec(chunk.array)
            large = spec.raw_bytes >= COMPRESS_FROM
            assert spec.sharded == (large and spec.dims[1] == "task" and spec.part.raw_bytes >= SMALLEST_PART)
    assert run.files.spec("rollouts_0/observations").sharded
    assert not run.files.spec("rollouts_0/lengths").sharded


@pytest.mark.parametrize("task", [3, -1, [5, 0], slice(None, None, 3), range(2)])
def test_some_tasks_are_those_of_the_whole(run, task):
    chosen = places(task, SIZES["B"], "task")
    for k in (0, 1):
        for read in (run[1].rollouts, run[1].samples):
            whole, part = flatten(read(k)), flatten(read(k, task=task))
            assert whole.keys() == part.keys()
            assert all(np.array_equal(part[name], whole[name][chosen]) for name in whole)
    assert np.array_equal(run[1].adapted(0, task=task).params["net.bias"], run[1].adapted(0).params["net.bias"][chosen])
    assert np.array_equal(run[1].tasks(task=task).params, run[1].tasks().params[chosen])
    assert run[1].xarray(0, task=task).identical(run[1].xarray(0).isel(task=chosen))


@pytest.mark.parametrize("filters", [{"task": 3}, {"episode": [4, 1]}, {"task": [6, 2], "episode": -1, "steps": 1}])
def test_filtered_tables_are_the_rows_of_whole_ones(run, filters):
    for name in ("steps", "episodes"):
        frame, found = getattr(run, name)().to_pandas(), getattr(run, name)(**filters).to_pandas()
        expected = frame
        for column in ("task", "episode"):
            if column in filters:
                wanted = places(filters[column], SIZES["B" if column == "task" else "E"], column)
                expected = expected[expected[column].isin(wanted)]
        if "steps" in filters:
            expected = expected[expected["step"] == filters["steps"]]
        order = ["iteration", "step", "task", "episode", *(["t"] if name == "steps" else [])]
        found, expected = (f.sort_values(order, ignore_index=True) for f in (found, expected))
        assert len(found)
        assert found.astype(str).equals(expected.astype(str))


@pytest.mark.parametrize("episodes", [slice(None, None, -1), [5, 4, 3, 2, 1, 0], [2] * 6, [1] * 7, [0, 5] * 6])
def test_steps_of_episodes_in_any_order_and_number_are_those_that_their_columns_name(run, episodes):
    whole, found = run.steps(1, steps=0, task=2), run.steps(1, steps=0, task=2, episode=episodes)
    expected = [whole.filter(whole["episode"].to_numpy() == e) for e in places(episodes, SIZES["E"], "episode")]
    # As text, since NaN is not itself.
    assert str(found.to_pylist()) == str([row for table in expected for row in table.to_pylist()])


@pytest.mark.parametrize("number", [np.int64(1), np.int64(-1), np.uint8(0)])
def test_places_steps_and_iterations_may_be_integers_of_numpys(run, number):
    plain = int(number)
    assert run.steps(number, task=number, episode=number).equals(run.steps(plain, task=plain, episode=plain))
    assert run.steps(steps=abs(number)).equals(run.steps(steps=abs(plain)))
    assert run.episodes(steps=abs(number)).equals(run.episodes(steps=abs(plain)))
    assert run[number].index == run[plain].index


@pytest.mark.parametrize("wrong", [True, [True, False], np.array([False, True]), 0.0, [1.9], "1", "01"])
def test_what_is_no_whole_number_chooses_nothing(run, wrong):
    for read in (
        lambda: run.steps(wrong),
        lambda: run.steps(steps=wrong),
        lambda: run.steps(task=wrong),
        lambda: run.episodes(episode=wrong),
        lambda: run.episodes(steps=wrong),
        lambda: run[0].rollouts(0, task=wrong),
    ):
        with pytest.raises(ValueError, match="must be an integer or a list"):
            read()


def test_inner_steps_are_not_counted_from_the_end(run):
    for read in (run.steps, run.episodes):
        with pytest.raises(ValueError, match="got inner step -1; inner steps start at 0"):
            read(steps=-1)


def test_a_stage_is_chosen_by_its_group(run, make_off_policy_run):
    assert run.steps(stage="rollouts_1").equals(run.steps(steps=1))
    off_policy = storage.open_run(make_off_policy_run(1, "off"))
    fill, table = off_policy[0].memory_fill(), off_policy.steps(stage="memory_fill", columns=["task", "reward"])
    assert table["reward"].to_numpy().tolist() == fill.rewards[fill.mask == 1].tolist()
    with pytest.raises(ValueError, match=r"no rollouts stored as 'rollouts'; stored so far: rollouts_0, rollouts_1"):
        run.steps(stage="rollouts")


def test_what_there_is_not_is_refused(run):
    with pytest.raises(ValueError, match="no task 8; choose one from 0 to 7"):
        run[0].rollouts(0, task=8)
    with pytest.raises(ValueError, match="no episode -7; choose one from 0 to 5"):
        run.steps(episode=-7)
    with pytest.raises(ValueError, match="no task 8"):
        run.episodes(task=8)
    with pytest.raises(ValueError, match="no task axis; omit `task`"):
        run.load(run.learner_ref(0), task=0)


def test_one_task_costs_its_own_bytes(run):
    record = run.record(StageRef(0, "collect_rollouts"))
    (chunk,) = [chunk for chunk in record.chunks if chunk.array == "rollouts_0/observations"]
    read, pread = [], os.pread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", lambda fd, size, offset: read.append(size) or pread(fd, size, offset))
        run.files.read_row(record, chunk, [3])
    assert sum(read) == TAIL + (chunk.size - TAIL) // SIZES["B"]


def _flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def test_every_flipped_byte_of_the_table_and_index_is_found_whatever_task_is_read(run):
    file = run.path / OBSERVATIONS
    whole = file.read_bytes()
    for offset in range(len(whole) - TAIL, len(whole)):
        _flip(file, offset)
        with pytest.raises(storage.DamagedRun, match="table of parts"):
            run[0].rollouts(0, task=0)
        file.write_bytes(whole)


def test_a_flipped_byte_of_a_part_is_found_by_whoever_reads_that_part(run):
    file = run.path / OBSERVATIONS
    whole, sound = file.read_bytes(), run[0].rollouts(0, task=4).observations
    size = (len(whole) - TAIL) // SIZES["B"]
    for offset in {*range(5 * size, 5 * size + 24), *range(5 * size, 6 * size, 997), *range(6 * size - 5, 6 * size)}:
        _flip(file, offset)
        for task in (5, None):
            with pytest.raises(storage.DamagedRun, match="CRC-32C"):
                run[0].rollouts(0, task=task)
        with pytest.raises(storage.DamagedRun, match="CRC-32C"):
            run.steps(0, columns=["observation"], task=5, steps=0)
        assert np.array_equal(run[0].rollouts(0, task=4).observations, sound)
        file.write_bytes(whole)


@pytest.mark.parametrize("cut", [1, TAIL - 1, TAIL, TAIL + 1, None])
def test_a_truncated_shard_is_found_whatever_task_is_read(run, cut):
    file = run.path / OBSERVATIONS
    file.write_bytes(b"" if cut is None else file.read_bytes()[:-cut])
    with pytest.raises(storage.DamagedRun, match="were committed"):
        run[0].rollouts(0, task=0)
    assert [damage.file for damage in storage.verify_run(run.path)] == [OBSERVATIONS]


def test_a_shard_of_another_iteration_is_found_whatever_task_is_read(run):
    file, other = run.path / OBSERVATIONS, run.path / OBSERVATIONS.replace("c.0", "c.1")
    assert file.stat().st_size == other.stat().st_size
    file.write_bytes(other.read_bytes())
    for task in (*range(SIZES["B"]), None):
        with pytest.raises(storage.DamagedRun, match="table of parts"):
            run[0].rollouts(0, task=task)
    assert [damage.file for damage in storage.verify_run(run.path)] == [OBSERVATIONS]


@pytest.mark.parametrize("source", ["c.0", "c.1"])
def test_a_valid_part_in_the_place_of_another_is_found_although_the_checksum_of_the_file_is_the_same(run, source):
    file, other = run.path / OBSERVATIONS, run.path / OBSERVATIONS.replace("c.0", source)
    before, raw = file.read_bytes(), bytearray(file.read_bytes())
    size = (len(raw) - TAIL) // SIZES["B"]
    raw[2 * size : 3 * size] = other.read_bytes()[6 * size : 7 * size]
    file.write_bytes(raw)
    assert before != bytes(raw)
    assert google_crc32c.value(before) == google_crc32c.value(bytes(raw))
    for task in (2, None):
        with pytest.raises(storage.DamagedRun, match="CRC-32C"):
            run[0].rollouts(0, task=task)
    assert [damage.file for damage in storage.verify_run(run.path)] == [OBSERVATIONS]


def test_an_index_that_is_valid_by_itself_but_not_the_committed_one_is_found(run):
    file = run.path / OBSERVATIONS
    raw = bytearray(file.read_bytes())
    B, start = SIZES["B"], len(raw) - TAIL
    places = np.frombuffer(bytes(raw[start + 4 * B : -4]), "<u8").reshape(B, 2)[::-1]
    raw[start + 4 * B : -4] = places.tobytes()
    raw[-4:] = google_crc32c.value(places.tobytes()).to_bytes(4, "little")
    assert google_crc32c.value(bytes(raw)) == google_crc32c.value(file.read_bytes())
    file.write_bytes(raw)
    with pytest.raises(storage.DamagedRun, match="table of parts"):
        run[0].rollouts(0, task=0)


def test_a_damaged_shard_is_taken_out_by_repair_and_can_be_put_again(run, put):
    ref, before = StageRef(1, "collect_rollouts"), run[1].rollouts(0)
    _flip(run.path / OBSERVATIONS.replace("c.0", "c.1"), 100)
    with storage.open_writer(run.path, repair=True) as writer:
        assert [line.partition(":")[0] for line in writer.repaired] == [OBSERVATIONS.replace("c.0", "c.1")]
        put(writer, [(ref, before, [])])
        put(writer, [(StageRef(1, "meta_optimize"), run[0].update(), [])])
    assert storage.verify_run(run.path) == []
    assert storage.digest(run[1].rollouts(0)) == storage.digest(before)


def test_thinned_shards_come_back_with_the_same_bytes(run):
    ref = StageRef(0, "collect_rollouts")
    value, raw = run.load(ref), (run.path / OBSERVATIONS).read_bytes()
    values = {ref: run.load(ref) for ref in run.thinnable([0])}
    with storage.open_writer(run.path) as writer:
        writer.thin([0])
        with pytest.raises(storage.StageThinned):
            run[0].rollouts(0, task=2)
        writer.restore(values)
    assert (run.path / OBSERVATIONS).read_bytes() == raw
    assert storage.digest(run[0].rollouts(0)) == storage.digest(value)


def test_a_fork_shares_shards(run, tmp_path):
    about = {"config": {"seed": 2}, "config_digest": "def", "environment": {}}
    storage.fork_run(run, 1, tmp_path / "fork", capacity=3, **about)
    assert os.path.samefile(run.path / OBSERVATIONS, tmp_path / "fork" / OBSERVATIONS)
    assert storage.verify_run(tmp_path / "fork") == []


def test_a_run_that_began_without_shards_goes_on_without_them_and_so_do_its_forks(
    tmp_path, put, make_batches, creation, monkeypatch
):
    monkeypatch.setattr("metaloom.storage.write.creation.FORMAT", "metaloom/1")
    batches = make_batches(**SIZES)
    with storage.create_run(tmp_path / "run", capacity=3, **creation) as writer:
        put(writer, batches.iteration(0))
    monkeypatch.undo()
    with storage.open_writer(tmp_path / "run") as writer:
        put(writer, batches.iteration(1))
    about = {"config": {"seed": 2}, "config_digest": "def", "environment": {}}
    storage.fork_run(storage.open_run(tmp_path / "run"), 1, tmp_path / "fork", capacity=3, **about)
    with storage.open_writer(tmp_path / "fork") as writer:
        put(writer, batches.iteration(1))
    for name in ("run", "fork"):
        run = storage.open_run(tmp_path / name)
        assert run.info["format"] == "metaloom/1"
        assert not any(run.files.spec(c.array).sharded for ref in run.refs() for c in run.record(ref).chunks)
        assert np.array_equal(run[1].rollouts(0, task=[5, 2]).observations, run[1].rollouts(0).observations[[5, 2]])
        assert storage.verify_run(run.path) == []
