"""Runs as tables: for pandas, for DuckDB, for plain pyarrow, for xarray."""

import subprocess
import sys
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import xarray as xr

from metaloom import storage
from metaloom.pipeline.types import Samples
from metaloom.storage import StageRef
from metaloom.storage.format.columns import column
from metaloom.storage.read import frames
from metaloom.storage.write.packed_tables import table_file


@pytest.fixture
def run(make_run):
    return storage.open_run(make_run(3))


def test_steps_have_one_row_per_real_step_with_the_numbers_of_the_batches(run):
    steps = run.steps().to_pandas()
    arrays = ["observation", "action", "mean", "reward", "reward_control", "reward_run", "return", "value", "advantage"]
    assert [*steps] == ["iteration", "step", "task", "episode", "t", *arrays, "terminated", "truncated"]
    assert len(steps) == sum(run[i].rollouts(k).num_steps for i in range(3) for k in range(2))
    for row in steps.sample(40, random_state=0).itertuples(index=False):
        episodes, samples = run[row.iteration].rollouts(row.step), run[row.iteration].samples(row.step)
        at = (row.task, row.episode, row.t)
        assert row.t < episodes.lengths[at[:2]]
        assert (row.observation == episodes.observations[at]).all()
        assert (row.action == episodes.actions[at]).all()
        assert (row.mean == episodes.behavior["mean"][at]).all()
        assert row.reward == episodes.rewards[at]
        assert row.reward_run == episodes.reward_terms["run"][at]
        assert (row.value, row.advantage) == (samples.values[at], samples.advantages[at])


def test_steps_have_a_column_of_adjusted_rewards_where_the_run_has_them(tmp_path, creation, put, make_batches, run):
    batches = make_batches()
    outputs = []
    for ref, value, inputs in batches.iteration(0):
        if ref.stage == "process_samples":
            value = replace(value, adjusted_rewards=value.returns * 2)
        outputs.append((ref, value, inputs))
    with storage.create_run(tmp_path / "dice", capacity=1, **creation) as writer:
        put(writer, outputs)
    steps = storage.open_run(tmp_path / "dice").steps().to_pandas()
    assert (steps.adjusted_reward == 2 * steps["return"]).all()
    assert storage.open_run(tmp_path / "dice").steps(columns=["adjusted_reward"]).column_names == ["adjusted_reward"]
    dataset = storage.open_run(tmp_path / "dice")[0].xarray(1)
    assert dataset.adjusted_rewards.dims == ("task", "episode", "t")
    assert "adjusted_reward" not in run.steps().column_names
    with pytest.raises(ValueError, match="adjusted_reward"):
        run.steps(columns=["adjusted_reward"])


def test_episodes_end_on_their_last_row_of_steps_and_nowhere_else(run):
    steps, episodes = run.steps().to_pandas(), run.episodes().to_pandas()
    keys = ["iteration", "step", "task", "episode"]
    ends = steps[steps.terminated | steps.truncated]
    assert len(ends) == len(episodes)
    merged = ends.merge(episodes, on=keys, suffixes=("", "_episode"))
    assert (merged.t == merged.length - 1).all()
    assert (merged.terminated == merged.terminated_episode).all()
    assert (merged.truncated == merged.truncated_episode).all()
    returns = steps.groupby(keys).reward.sum().reset_index().merge(episodes, on=keys)
    np.testing.assert_allclose(returns.reward, returns["return"], rtol=1e-5)


def test_one_line_of_pandas_gives_the_mean_return_per_iteration_before_and_after_adaptation(run):
    means = run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean().unstack()
    expected = [[run[i].rollouts(k).episode_returns.mean() for k in range(2)] for i in range(3)]
    np.testing.assert_allclose(means.to_numpy(), expected, rtol=1e-12)


def test_episodes_and_tasks_carry_the_task_parameters_with_their_units(run):
    episodes, tasks = run.episodes(), run.tasks()
    assert tasks.schema.field("task_velocity").metadata == {b"unit": b"m/s"}
    assert tasks.column_names == ["iteration", "task", "id", "task_velocity", "task_mass"]
    first = episodes.to_pandas().iloc[-1]
    assert first.task_mass == run[2].tasks().params[first.task, 1]


def test_metrics_have_one_row_per_iteration(run):
    metrics = run.metrics()
    assert metrics.column_names == ["iteration", "loss", "step_0.average_return"]
    assert metrics["step_0.average_return"].to_pylist() == [run[i].metrics()["step_0.average_return"] for i in range(3)]


def test_lineage_has_one_row_per_output_in_the_order_of_their_making(run):
    lineage = run.lineage()
    assert lineage["sequence"].to_pylist() == list(range(len(run.refs())))
    assert frames.lineage(run.record(ref) for ref in reversed(run.refs())).equals(lineage)
    row = lineage.filter(pa.compute.equal(lineage["stage"], "adapt")).to_pylist()[1]
    assert (row["iteration"], row["seconds"], row["config_digest"]) == (1, 0.25, "abc")
    assert row["digest"] == run.record(StageRef(1, "adapt")).digest
    samples = StageRef(1, "process_samples")
    assert row["inputs"] == [
        {"iteration": 1, "stage": "process_samples", "step": 0, "digest": run.record(samples).digest}
    ]
    assert isinstance(lineage.to_pandas().started[0], pd.Timestamp)


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (None, [0, 1, 2]),
        (1, [1]),
        (-1, [2]),
        (range(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(-2, None), [1, 2]),
        ([2, 0], [0, 2]),
        ([-1, 0], [0, 2]),
        (slice(3, None), []),
    ],
)
def test_every_table_can_be_had_for_some_iterations(run, selection, chosen):
    for table in (run.steps(selection), run.episodes(selection), run.tasks(selection), run.metrics(selection)):
        assert sorted(set(table["iteration"].to_pylist())) == chosen
        assert table.schema.field("iteration").type == pa.int32()


def test_every_table_has_each_iteration_once_and_in_order(make_run):
    run = storage.open_run(make_run(3))
    for read in (run.steps, run.episodes, run.tasks, run.metrics):
        assert read([2, 0, -1, 0]).equals(read([0, 2]))


def test_iterations_that_are_not_complete_are_refused_or_left_out(make_run, put, batches):
    path = make_run(1, capacity=3)
    with storage.open_writer(path) as writer:
        put(writer, batches.iteration(1)[:-1])
    run = storage.open_run(path)
    assert run.iterations == range(1)
    assert set(run.steps()["iteration"].to_pylist()) == {0}
    assert run[1].rollouts(0).num_steps > 0
    with pytest.raises(storage.StageMissing):
        run.steps(1)
    with pytest.raises(storage.StageMissing):
        run.episodes([0, 1])
    for wrong, told in (
        ([-2], "iteration -2 does not exist; 1 iterations are complete"),
        (1, "`metaloom resume .*/run` c"),
    ):
        with pytest.raises(storage.StageMissing, match=told):
            run.select(wrong)
    for i in (3, 100):  # the target is 3
        told = rf"from 0 to 0\. `metaloom resume .*/run --iterations {i + 1}` computes"
        with pytest.raises(storage.StageMissing, match=told):
            run[i]


@pytest.mark.parametrize("wrong", [1.5, "1", True])
def test_an_iteration_that_is_no_integer_is_refused(run, wrong):
    with pytest.raises(ValueError, match="iteration must be an integer"):
        run[wrong]


def test_an_inner_step_that_does_not_exist_is_refused_as_such(run):
    with pytest.raises(
        storage.StageMissing, match=r"k=7\) is not stored, and iteration 0 is complete; .*of the iteration: 0, 1\."
    ):
        run[0].rollouts(7)
    for read in (run.steps, run.episodes):
        with pytest.raises(ValueError, match="no inner step 5; choose one of 0, 1"):
            read(steps=5)


def test_a_star_stands_for_all_terms_of_the_reward(run):
    assert run.steps(columns=["t", "reward_*"]).column_names == ["t", "reward_control", "reward_run"]


def test_a_run_without_iterations_says_that_it_has_none(tmp_path, creation):
    storage.create_run(tmp_path / "run", capacity=1, **creation).close()
    run = storage.open_run(tmp_path / "run")
    assert (len(run), list(run), run.refs(), run.lineage().num_rows) == (0, [], [], 0)
    for table in (run.steps, run.episodes, run.metrics):
        with pytest.raises(storage.StageMissing):
            table()


def test_only_the_arrays_that_columns_need_are_read(run, monkeypatch):
    read = []
    read_row = type(run.files).read_row
    monkeypatch.setattr(
        type(run.files), "read_row", lambda self, r, c, *tasks: read.append(c.array) or read_row(self, r, c, *tasks)
    )
    table = run.steps(0, columns=["task", "reward"], steps=1)
    assert table.column_names == ["task", "reward"]
    assert {array.partition("/")[2] for array in read} == {"rewards", "lengths"}


def test_an_unknown_column_is_refused_with_the_known_ones(run):
    with pytest.raises(ValueError, match=r"velocity.*the columns are iteration, step"):
        run.steps(columns=["velocity"])


def test_scanning_reads_one_round_of_rollouts_at_a_time(run):
    reader = run.scan_steps(columns=["iteration", "step", "reward"])
    rounds = [(set(b["iteration"].to_pylist()), set(b["step"].to_pylist())) for b in reader]
    assert rounds == [({i}, {k}) for i in range(3) for k in range(2)]


def test_steps_of_a_batch_without_padding_are_all_its_steps_in_order(creation, tmp_path, put, make_batches):
    batches = make_batches()
    with storage.create_run(tmp_path / "full", capacity=1, **creation) as writer:
        outputs = batches.iteration(0, rounds=1)
        full = batches.episodes(lengths=np.full((3, 2), 5))
        outputs[2] = (outputs[2][0], full, outputs[2][2])
        put(writer, outputs)
    steps = storage.open_run(tmp_path / "full").steps()
    assert (steps["reward"].to_numpy() == full.rewards.reshape(-1)).all()
    assert steps["t"].to_pylist() == list(range(5)) * 6


def test_discrete_actions_are_plain_numbers(tmp_path, creation, put, batches):
    outputs = batches.iteration(0, rounds=1)
    ref, episodes, inputs = outputs[2]
    actions = np.arange(episodes.rewards.size).reshape(episodes.rewards.shape)
    outputs[2] = (ref, replace(episodes, actions=actions), inputs)
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        put(writer, outputs)
    steps = storage.open_run(tmp_path / "run").steps()
    assert steps["action"].to_pylist() == actions[episodes.mask == 1].tolist()


def test_duckdb_and_plain_pyarrow_read_the_tables_without_this_package(run):
    files = run.path / "tables" / "episodes"
    query = f"select iteration, step, avg(return) from '{files}/*.parquet' group by all order by all"
    expected = [(i, k, run[i].rollouts(k).episode_returns.mean()) for i in range(3) for k in range(2)]
    for found, wanted in zip(duckdb.sql(query).fetchall(), expected, strict=True):
        assert found == pytest.approx(wanted)
    table = pyarrow.dataset.dataset(files).to_table(columns=["iteration", "return"])
    assert table.num_rows == run.episodes().num_rows


def test_a_resumed_writer_makes_the_same_tables(make_run, put, make_batches, tmp_path, creation):
    whole = make_run(1)
    outputs = make_batches().iteration(0)
    for cut in range(1, len(outputs)):
        path = tmp_path / f"cut-{cut}"
        with storage.create_run(path, capacity=1, **creation) as writer:
            put(writer, outputs[:cut])
        with storage.open_writer(path) as writer:
            put(writer, outputs[cut:])
        for table in ("episodes", "tasks", "metrics"):
            name = f"tables/{table}/00000000.parquet"
            assert (path / name).read_bytes() == (whole / name).read_bytes()


def test_an_xarray_dataset_has_named_axes_units_and_tasks_as_coordinates(run):
    data = run[1].xarray(1)
    assert data.rewards.dims == ("task", "episode", "t")
    assert data.observations.dims == ("task", "episode", "t_with_final", "observation")
    assert (data.advantages.values == run[1].samples(1).advantages).all()
    assert data.task_velocity.attrs["units"] == "m/s"
    assert (data.task_velocity.values == run[1].tasks().params[:, 0]).all()
    assert data.attrs["description"].startswith("Quantities computed from a batch of episodes for learning")
    assert (data.attrs["iteration"], data.attrs["step"]) == (1, 1)
    ends = ["initial_state", "lengths", "observations", "reward_terms.control", "reward_terms.run", "rewards"]
    behavior, samples = ["behavior.log_std", "behavior.mean"], ["advantages", "mask", "returns", "values"]
    assert [*data.data_vars] == ["actions", *behavior, *ends, "terminated", "truncated", *samples]
    with pytest.raises(storage.StageMissing):
        run[1].xarray(2)


def test_plain_xarray_opens_every_group_without_a_warning(run):
    for group in sorted(file.name for file in (run.path / "data.zarr").iterdir() if file.is_dir()):
        data = xr.open_zarr(run.path / "data.zarr", group=group, consolidated=False, chunks=None)
        leading = "row" if group == "learner" else "iteration"
        assert data.sizes[leading] == 3 + (group == "learner")
    rollouts = xr.open_zarr(run.path / "data.zarr", group="rollouts_0", consolidated=False, chunks=None)
    assert rollouts.lengths.attrs["unit"] == "steps"
    assert (rollouts.rewards.values[2] == run[2].rollouts(0).rewards).all()


@pytest.mark.parametrize("use", ["", "storage.open_run(sys.argv[1])[0].rollouts(0); storage.verify_run(sys.argv[1])"])
def test_opening_a_run_imports_neither_torch_nor_a_simulator_nor_an_orchestrator(run, use):
    heavy = "{'torch', 'mujoco', 'gymnasium', 'prefect', 'dask', 'distributed', 'pandas', 'zarr', 'pyarrow'}"
    code = f"import sys, storage; {use or 'pass'}; sys.exit(str({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "set()\n")


def test_a_writing_process_needs_no_pandas(tmp_path):
    code = """
import sys, time, numpy as np, storage
from metaloom.pipeline.types import LearnerState, Update
from metaloom.storage import StageRef
about = dict(inputs=[], seed_position=[], started=0.0, seconds=0.0)
with storage.create_run(sys.argv[1], config={}, config_digest="", capacity=2, environment={}) as writer:
    for i in range(2):
        update = Update(LearnerState({"a": np.zeros(2, np.float32)}), {"loss": 1.0})
        writer.put(StageRef(i, "meta_optimize"), update, **about)
    assert writer.pack() == [range(1)]
sys.exit("pandas" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert storage.open_run(tmp_path / "run").metrics()["loss"].to_pylist() == [1.0, 1.0]


def test_metrics_read_from_their_arrays_are_those_in_the_parquet_files(make_run):
    run = storage.open_run(make_run(3))
    files = sorted((run.path / "tables" / "metrics").iterdir())
    found = run.metrics()
    assert found.equals(pa.concat_tables([pq.read_table(file) for file in files]))
    assert run.metrics([]).num_rows == run.tasks([]).num_rows == 0
    for file in files:
        file.write_bytes(b"")
    assert run.metrics().equals(found)  # the arrays suffice


def test_rows_of_packed_iterations_are_in_the_order_of_iterations(make_run):
    run = storage.open_run(make_run(9, B=1, E=1, T=1))
    records = [run.record(ref) for ref in run.refs() if ref.iteration >= 7]  # of which a set begins with 8
    raw = table_file(run.files, "tasks", records)
    assert pq.read_table(pa.BufferReader(raw))["iteration"].to_pylist() == [7, 8]


def test_a_table_has_a_row_per_entry_of_real_steps_and_of_arrays_of_other_sizes(tmp_path, creation, put, batches):
    episodes, sizes = batches.episodes(np.array([[5, 1], [2, 3], [4, 1]])), [(2, 2, 5), (3, 1, 5), (3, 2, 4)]
    samples = [Samples(*(np.ones(size, np.float32) for _ in range(4))) for size in sizes]
    outputs = {"collect_rollouts": [episodes] * 3, "process_samples": samples}
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        for ref, value, inputs in batches.iteration(0, rounds=3):
            put(writer, [(ref, outputs[ref.stage][ref.step] if ref.stage in outputs else value, inputs)])
    run = storage.open_run(tmp_path / "run")
    actions = run.table("rollouts", columns=["actions"], steps=0)
    assert actions.column_names == ["iteration", "step", "task", "episode", "t", "action", "actions"]
    assert actions["actions"].to_pylist() == episodes.actions[episodes.mask == 1].ravel().tolist()
    assert [run.table("samples", columns=["returns"], steps=k).num_rows for k in range(3)] == [20, 15, 24]


def test_names_of_another_number_of_components_are_not_those_of_a_vector(tmp_path, creation, put, batches):
    components = {"observation": {"names": ["x", "y", "z"], "units": ["m", "m", "m"]}}
    about = {**creation, "environment": {"components": components}}
    with storage.create_run(tmp_path / "run", capacity=1, **about) as writer:
        put(writer, batches.iteration(0))
    run = storage.open_run(tmp_path / "run")
    assert run.steps(columns=["observation"]).num_rows
    with pytest.raises(ValueError, match=r"steps have no columns \['observation.x'\]"):
        run.steps(columns=["observation.x"])


def test_an_axis_without_entries_is_a_column_of_empty_lists():
    found = column(np.zeros((3, 0), np.float32))
    assert found.to_pylist() == [[], [], []]
    pairs = column(np.arange(6, dtype=np.int64).reshape(3, 2))
    assert pairs.to_pylist() == [[0, 1], [2, 3], [4, 5]]
    assert pairs.type == pa.list_(pa.field("item", pa.int64(), nullable=False), 2)
