"""Exports, each opened by the tools it is for."""

import json
import subprocess
import sys

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaloom import storage
from metaloom.flows.exports import format_of
from metaloom.flows.exports.parquet import _write_table
from metaloom.pipeline.types import TaskBatch
from metaloom.storage import StageRef
from metaloom.storage.export import ExportExists, export_folder

MEASURE_PEAKS = """
import json, sys, tracemalloc
from pathlib import Path
from metaloom import storage
from metaloom.flows.exports import format_of

form, folder, *runs = sys.argv[1:]
format_of(form).export(storage.open_run(runs[0]), Path(folder, "imports"))
peaks = []
for number, path in enumerate(runs):
    run = storage.open_run(path)
    tracemalloc.start()
    format_of(form).export(run, Path(folder, f"out-{number}"))
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
print(json.dumps(peaks))
"""
# In a process of its own, since Python counts what all threads allocate; the first export imports what it needs.


@pytest.fixture
def run(make_run):
    return storage.open_run(make_run(3))


@pytest.fixture
def parquet(run, tmp_path):
    export = format_of("parquet").export(run, tmp_path / "new" / "parquet")
    assert export.rows == run.steps().num_rows
    return export.path


def expected_means(run):
    return run.steps().to_pandas().groupby(["iteration", "step"])["reward"].mean()


def test_duckdb_reads_the_steps_with_their_partitions(run, parquet):
    files = f"read_parquet('{parquet}/steps/**/*.parquet', hive_partitioning=true)"
    query = f"select iteration, stage, avg(reward) from {files} group by all order by iteration, stage"
    rows = duckdb.sql(query).fetchall()
    assert [row[:2] for row in rows] == [(i, f"rollouts_{k}") for i in range(3) for k in range(2)]
    np.testing.assert_allclose([row[2] for row in rows], expected_means(run), rtol=1e-6)


def test_polars_reads_the_steps_with_their_partitions(run, parquet):
    frame = pl.scan_parquet(parquet / "steps", hive_partitioning=True)
    found = frame.group_by("iteration", "stage").agg(pl.col("reward").mean()).sort("iteration", "stage").collect()
    np.testing.assert_allclose(found["reward"], expected_means(run), rtol=1e-6)
    first = frame.filter((pl.col("iteration") == 1) & (pl.col("stage") == "rollouts_0")).collect()
    np.testing.assert_array_equal(first["observation"][0], run[1].rollouts(0).observations[0, 0, 0])


def test_pandas_reads_the_steps_with_their_partitions(run, parquet):
    frame = pd.read_parquet(parquet / "steps")
    found = frame.astype({"iteration": int, "stage": str}).groupby(["iteration", "stage"])["reward"].mean()
    np.testing.assert_allclose(found, expected_means(run), rtol=1e-6)


def test_every_column_of_steps_is_there_and_equal(run, parquet):
    whole = run.steps()
    for i in range(3):
        for k in range(2):
            file = parquet / "steps" / f"iteration={i}" / f"stage=rollouts_{k}" / "steps.parquet"
            part = whole.filter((pa.compute.field("iteration") == i) & (pa.compute.field("step") == k))
            assert pq.ParquetFile(file).read().equals(part.drop_columns("iteration"))


def test_the_derived_tables_lie_beside_the_steps(run, parquet):
    for name in ("episodes", "tasks", "metrics"):
        table = pq.ParquetFile(parquet / f"{name}.parquet").read()
        assert table.equals(getattr(run, name)())
    assert not (parquet / "evaluations.parquet").exists()


def test_iterations_and_rounds_can_be_chosen(run, tmp_path):
    export = format_of("parquet").export(run, tmp_path / "out", iterations=slice(1, None), steps=[1])
    assert export.iterations == 2
    found = {file.parent.relative_to(export.path).as_posix() for file in export.path.glob("steps/*/*/*.parquet")}
    assert found == {f"steps/iteration={i}/stage=rollouts_1" for i in (1, 2)}
    episodes = pq.ParquetFile(export.path / "episodes.parquet").read()
    assert set(episodes["step"].to_pylist()) == {1}
    assert set(episodes["iteration"].to_pylist()) == {1, 2}


@pytest.mark.parametrize("form", ["parquet", "histories"])
def test_iterations_whose_episodes_are_gone_are_left_out_and_named(run, tmp_path, form):
    for k in range(2):
        (run.path / "_commits" / StageRef(1, "collect_rollouts", k).file_name).unlink()
    result = format_of(form).export(run, tmp_path / "out")
    assert result.iterations == 2
    assert result.skipped == [(1, "no episodes of these inner steps are stored")]


@pytest.mark.parametrize("form", ["parquet", "histories"])
def test_memory_stays_within_one_iteration_however_long_the_run(make_run, tmp_path, form):
    sizes = {"B": 8, "E": 4, "T": 50, "O": 30}
    runs = [make_run(iterations, name=f"run-{iterations}", **sizes) for iterations in (2, 6)]
    command = [sys.executable, "-c", MEASURE_PEAKS, form, str(tmp_path), *map(str, runs)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    peaks = json.loads(told)
    one_iteration = 2 * 8 * 4 * 50 * 40 * 4
    assert peaks[1] < 1.2 * peaks[0] + 2**18
    assert peaks[1] < 6 * one_iteration
    groups = [
        pq.ParquetFile(file).metadata.row_group(g).total_byte_size
        for file in (tmp_path / "out-1").rglob("*.parquet")
        for g in range(pq.ParquetFile(file).metadata.num_row_groups)
    ]
    assert max(groups) < 2 * one_iteration


def test_a_derived_table_has_every_iteration_of_a_long_run_once(tmp_path):
    table_of = lambda iterations: pa.table({"iteration": [*iterations]})  # noqa: E731
    _write_table(tmp_path / "metrics.parquet", table_of, range(130), None)
    assert pq.read_table(tmp_path / "metrics.parquet")["iteration"].to_pylist() == [*range(130)]


def read_histories(folder):
    tables = [pq.ParquetFile(file).read() for file in sorted(folder.glob("*.parquet"))]
    return pa.concat_tables(tables).to_pylist()


def check_history(run, rows):
    """Every row holds its episode, whole, and rows of a history follow one another in training order."""
    for row in rows:
        batch = run[row["iteration"]].rollouts(row["step"])
        b, e = row["task"], row["episode"]
        T = int(batch.lengths[b, e])
        assert row["length"] == T
        np.testing.assert_array_equal(row["observations"], batch.observations[b, e, : T + 1])
        np.testing.assert_array_equal(row["actions"], batch.actions[b, e, :T])
        np.testing.assert_array_equal(row["rewards"], batch.rewards[b, e, :T])
        assert row["return"] == batch.episode_returns[b, e]
        assert row["task_velocity"] == run[row["iteration"]].tasks().params[b, 0]
    keys = [(row["history"], row["order"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert [*rows[0]][:3] == ["history", "order", "iteration"]
    for history in {row["history"] for row in rows}:
        mine = [row for row in rows if row["history"] == history]
        assert [row["order"] for row in mine] == list(range(len(mine)))
        when = [(row["iteration"], row["step"]) for row in mine]
        assert when == sorted(when)


def test_the_history_of_a_drawn_task_is_its_adaptation(run, tmp_path):
    export = format_of("histories").export(run, tmp_path / "out")
    rows = read_histories(export.path)
    assert sorted(file.name for file in export.path.iterdir()) == [f"iteration-{i:08d}.parquet" for i in range(3)]
    assert export.rows == len(rows) == 3 * 2 * 3 * 2
    check_history(run, rows)
    assert {row["history"] for row in rows} == set(range(9))
    first = [(row["iteration"], row["task"], row["step"], row["episode"]) for row in rows if row["history"] == 4]
    assert first == [(1, 1, 0, 0), (1, 1, 0, 1), (1, 1, 1, 0), (1, 1, 1, 1)]


def test_the_history_of_a_position_goes_through_all_iterations(run, tmp_path):
    export = format_of("histories").export(run, tmp_path / "out", by="position")
    rows = read_histories(export.path)
    check_history(run, rows)
    assert [file.name for file in sorted(export.path.iterdir())] == [f"position-{b:08d}.parquet" for b in range(3)]
    assert all(row["history"] == row["task"] for row in rows)
    assert [row["iteration"] for row in rows if row["history"] == 2] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.fixture
def fixed_run(tmp_path, make_batches, put, creation):
    """A run whose tasks come from a set of three; the last iteration has one of them twice."""
    ids = [[0, 2, 1], [2, 0, 1], [1, 1, 0]]
    batches = make_batches()
    with storage.create_run(tmp_path / "fixed", capacity=3, **creation) as writer:
        for i, chosen in enumerate(ids):
            outputs = batches.iteration(i)
            tasks = TaskBatch(
                np.array([[c, c / 2] for c in chosen], float), np.array(chosen), ("velocity", "mass"), ("m/s", "kg")
            )
            put(writer, [(ref, tasks if ref.stage == "sample_tasks" else value, ins) for ref, value, ins in outputs])
    return storage.open_run(tmp_path / "fixed")


@pytest.mark.parametrize("open_files", [1, 2, 128])
def test_the_history_of_a_task_in_a_fixed_set_goes_through_all_iterations(fixed_run, tmp_path, monkeypatch, open_files):
    monkeypatch.setattr("metaloom.flows.exports.histories._OPEN_FILES", open_files)
    export = format_of("histories").export(fixed_run, tmp_path / "out")
    rows = read_histories(export.path)
    check_history(fixed_run, rows)
    assert export.rows == len(rows) == 36
    assert all(row["history"] == row["task_id"] == row["task_velocity"] for row in rows)
    assert [(row["iteration"], row["step"], row["task"]) for row in rows if row["history"] == 1] == [
        *[(0, k, 2) for k in (0, 0, 1, 1)],
        *[(1, k, 2) for k in (0, 0, 1, 1)],
        *[(2, k, b) for k in (0, 1) for b in (0, 0, 1, 1)],
    ]


def test_an_export_that_fails_leaves_nothing_behind(tmp_path):
    def fail():
        with export_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("done")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_written_over(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ExportExists, match="the path already exists"):
        format_of("parquet").export(run, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_an_empty_folder_is_taken(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert format_of("parquet").export(run, tmp_path / "out").iterations == 3


def test_an_iteration_that_is_not_complete_is_refused(run, tmp_path):
    with pytest.raises(storage.StageMissing, match="3 iterations are complete"):
        format_of("parquet").export(run, tmp_path / "out", iterations=7)
    assert not (tmp_path / "out").exists()
