"""Evaluations are stored, read, verified and refused like any other stage's output."""

from dataclasses import fields, replace

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.types import BatchError, Evaluation, TaskBatch
from metaloom.storage import StageRef

AFTER = StageRef(1, "evaluate")


@pytest.fixture
def evaluated(make_run, batches, put):
    """A run of three iterations with an evaluation after the second; also the evaluation."""
    path, evaluation = make_run(3), batches.evaluation()
    with storage.open_writer(path) as writer:
        put(writer, [(AFTER, evaluation, [StageRef(1, "meta_optimize")])])
    return path, evaluation


def test_an_evaluation_comes_back_as_it_was(evaluated):
    path, evaluation = evaluated
    found = storage.open_run(path)[1].evaluation()
    for field in fields(Evaluation):
        assert np.array_equal(getattr(found, field.name), getattr(evaluation, field.name)), field.name
    assert (found.names, found.units) == (("velocity", "mass"), ("m/s", "kg"))
    assert storage.verify_run(path) == []


def test_facts_of_an_evaluation_are_columns_in_the_order_of_their_names(make_run, batches, put):
    path, evaluation = make_run(1), batches.evaluation()
    facts = {
        f"{kind}_facts": {name: getattr(evaluation, f"{kind}_terminated") for name in ("success", "distance")}
        for kind in ("test", "adaptation")
    }
    with storage.open_writer(path) as writer:
        put(writer, [(StageRef(0, "evaluate"), replace(evaluation, **facts), [StageRef(0, "meta_optimize")])])
    columns = storage.open_run(path).evaluations().column_names
    assert [name for name in columns if name.startswith("fact_")] == ["fact_distance", "fact_success"]


def test_an_evaluation_without_adaptation_comes_back_as_it_was(make_run, batches, put):
    path, evaluation = make_run(1), batches.evaluation(adaptation_steps=0)
    with storage.open_writer(path) as writer:
        put(writer, [(StageRef(0, "evaluate"), evaluation, [StageRef(0, "meta_optimize")])])
    found = storage.open_run(path)[0].evaluation()
    assert np.array_equal(found.test_returns, evaluation.test_returns)
    assert found.adaptation_returns.shape == (3, 0, 2)
    assert len(storage.open_run(path).evaluations()) == 3 * 4
    assert storage.verify_run(path) == []


def test_it_stands_behind_the_update_of_its_iteration_and_is_no_part_of_the_next(evaluated):
    path, _ = evaluated
    refs = storage.open_run(path).refs()
    assert refs[refs.index(AFTER) - 1] == StageRef(1, "meta_optimize")
    assert refs[refs.index(AFTER) + 1] == StageRef(2, "sample_tasks")
    assert storage.open_run(path).iterations == range(3)


def test_the_table_has_a_row_per_episode_with_units(evaluated):
    path, evaluation = evaluated
    table = storage.open_run(path).evaluations()
    assert len(table) == evaluation.test_returns.size + evaluation.adaptation_returns.size
    assert table.schema.field("task_velocity").metadata == {b"unit": b"m/s"}
    frame = table.to_pandas()
    row = frame[frame["test"] & (frame["task"] == 2) & (frame["adaptation_steps"] == 1) & (frame["episode"] == 3)]
    assert row["return"].item() == evaluation.test_returns[2, 1, 3]
    assert row["terminated"].item() == evaluation.test_terminated[2, 1, 3]
    assert row["task_mass"].item() == evaluation.task_params[2, 1]
    assert row["updates"].item() == 2


def test_a_run_without_evaluations_says_so(make_run):
    run = storage.open_run(make_run(1))
    with pytest.raises(
        storage.StageMissing, match=r"no evaluation of these iterations is stored; expected .* evaluation\.every"
    ):
        run.evaluations()
    with pytest.raises(storage.StageMissing, match="evaluate"):
        run[0].evaluation()


def test_damage_is_found_and_repaired_by_taking_it_out(evaluated):
    path, _ = evaluated
    chunk = next((path / "data.zarr/evaluation/test_returns").glob("c.1.*"))
    chunk.write_bytes(b"x" + chunk.read_bytes()[1:])
    (damage,) = storage.verify_run(path)
    assert (damage.iteration, damage.stage, damage.array) == (1, "evaluate", "evaluation/test_returns")
    storage.open_writer(path, repair=True).close()
    assert not storage.open_run(path).contains(AFTER)


def test_a_damaged_table_is_found(evaluated):
    path, _ = evaluated
    (path / "tables/evaluations/00000001.parquet").write_bytes(b"nothing")
    (damage,) = storage.verify_run(path)
    assert (damage.file, damage.stage) == ("tables/evaluations/00000001.parquet", "evaluate")


def test_another_form_than_that_of_earlier_evaluations_is_refused(evaluated, batches, put):
    path, _ = evaluated
    ref = StageRef(2, "evaluate")
    with pytest.raises(storage.LayoutMismatch), storage.open_writer(path) as writer:
        put(writer, [(ref, batches.evaluation(adaptation_steps=1), [StageRef(2, "meta_optimize")])])
    assert not storage.open_run(path).contains(ref)


def test_arrays_that_do_not_fit_together_are_refused(batches):
    evaluation = batches.evaluation()
    with pytest.raises(BatchError, match="test_lengths has shape"):
        replace(evaluation, test_lengths=evaluation.test_lengths[:, 1:])
    with pytest.raises(BatchError, match="adaptation_returns has shape"):
        replace(evaluation, adaptation_returns=evaluation.adaptation_returns[:, :1])
    with pytest.raises(BatchError, match=r"test_returns.*expected \[B, K\+1, M\]"):
        replace(evaluation, test_returns=evaluation.test_returns[0])


def test_its_steps_are_those_of_both_kinds_of_episodes(batches):
    evaluation = batches.evaluation()
    assert evaluation.num_steps == evaluation.test_lengths.sum() + evaluation.adaptation_lengths.sum()
    assert (evaluation.adaptation_steps, evaluation.episodes_per_step) == (2, 2)
    assert isinstance(evaluation.tasks, TaskBatch)
