"""Runs that learn from stored transitions: minibatches are row numbers, and every row can be told where it is from."""

import re

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.stages import OFF_POLICY
from metaloom.storage.read.transitions import stored_rounds


@pytest.fixture
def run(make_off_policy_run):
    return storage.open_run(make_off_policy_run(3))


def rows_of(ref, episodes):
    """The transitions of a batch, one after the other, counted by hand."""
    B, E = episodes.lengths.shape
    return [(ref, b, e, t, episodes) for b in range(B) for e in range(E) for t in range(episodes.lengths[b, e])]


@pytest.fixture
def transitions(run):
    """All transitions of the run, in the order in which it collected them."""
    found = rows_of(StageRef(0, "fill_memory"), run[0].memory_fill())
    for i in range(3):
        for k in range(2):
            found += rows_of(StageRef(i, "collect_rollouts", k), run[i].rollouts(k))
    return found


def assert_describes(row, transition, run):
    ref, b, e, t, episodes = transition
    assert (row["iteration"], row["stage"], row["step"]) == (ref.iteration, ref.stage, ref.step)
    assert (row["task"], row["episode"], row["t"]) == (b, e, t)
    assert row["task_id"] == (None if ref.stage == "fill_memory" else run[ref.iteration].tasks().ids[b])
    assert row["observation"] == episodes.observations[b, e, t].tolist()
    assert row["action"] == episodes.actions[b, e, t].tolist()
    assert row["reward"] == episodes.rewards[b, e, t]
    assert row["next_observation"] == episodes.observations[b, e, t + 1].tolist()
    assert row["terminated"] == (episodes.terminated[b, e] and t == episodes.lengths[b, e] - 1)


def test_rows_number_the_real_steps_of_the_run_in_order_of_collection(run, transitions):
    table = run.transitions(range(len(transitions)))
    assert table["row"].to_pylist() == [*range(len(transitions))]
    for row, transition in zip(table.to_pylist(), transitions, strict=True):
        assert_describes(row, transition, run)
    assert any(table["terminated"].to_pylist())
    behind = len(transitions)
    with pytest.raises(storage.StageMissing, match=rf"no row {behind}; expected a row from 0 to {behind - 1}\."):
        run.transitions([behind])
    (row,) = run.transitions([first := run[0].memory_fill().num_steps]).to_pylist()  # the first of a batch
    assert_describes(row, transitions[first], run)


def test_rows_come_in_the_order_in_which_they_are_asked_for_and_as_often(run, transitions):
    wanted = [len(transitions) - 1, 0, 40, 0, 7]
    table = run.transitions(wanted)
    assert table["row"].to_pylist() == wanted
    for row, number in zip(table.to_pylist(), wanted, strict=True):
        assert_describes(row, transitions[number], run)


def test_no_rows_make_an_empty_table_with_all_columns(run):
    assert run.transitions([]).schema.names == run.transitions([0]).schema.names
    assert run.transitions([]).num_rows == 0


@pytest.mark.parametrize("context", [False, True])
def test_what_a_gradient_step_learned_from_is_materialised_with_its_lineage(run, transitions, context):
    batches = run[2].minibatches()
    numbers = batches.context_rows if context else batches.rows
    table = run[2].transitions(1, context=context).to_pylist()
    assert [row["row"] for row in table] == numbers[1].reshape(-1).tolist()
    for row in table:
        assert row["row"] == numbers[1, row["place"], row["n"]]
        assert row["memory"] == batches.task_ids[1, row["place"]]
        assert_describes(row, transitions[row["row"]], run)
    chosen = run[2].transitions(1, context=context, rows=slice(-4, None))
    assert chosen.to_pylist() == table[-4:]
    assert run[2].transitions().equals(run[2].transitions(0, context=False))


def test_only_batches_that_hold_a_row_are_read(run, transitions, monkeypatch):
    read, of = [], type(run.files).read_row
    monkeypatch.setattr(
        type(run.files),
        "read_row",
        lambda files, record, chunk, *tasks: (read.append(chunk.array), of(files, record, chunk, *tasks))[1],
    )
    first = len(rows_of(None, run[0].memory_fill()))
    read.clear()
    run.transitions([first, first + 1])
    assert {name for name in read if "lengths" not in name and "ids" not in name} == {
        f"rollouts_0/{name}" for name in ("observations", "actions", "rewards", "terminated", "truncated")
    }
    assert len([name for name in read if "observations" in name]) == 1


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda run: run.transitions([10**6]), "no row 1000000; expected a row from 0 to"),
        (lambda run: run[1].transitions(2), "no gradient step 2; expected a step from 0 to 1"),
        (lambda run: run[1].transitions(-1), "no gradient step -1"),
        (lambda run: run[5].transitions(), "iteration 5 does not exist; 3 iterations are complete"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(run, read, said):
    with pytest.raises(storage.StageMissing, match=said):
        read(run)


def test_empty_places_are_no_rows(run):
    assert run[0].minibatches().num_updates == 2
    with pytest.raises(ValueError, match="got -1"):
        run.transitions([3, -1])


def test_a_run_whose_algorithm_infers_no_tasks_has_no_context(tmp_path, creation, put, make_batches):
    batches = make_batches(B=1)
    outputs = batches.off_policy_iteration(0, rounds=1)
    outputs = [
        (r, batches.minibatches(context=False) if r.stage == "sample_transitions" else v, i) for r, v, i in outputs
    ]
    with storage.create_run(tmp_path / "run", capacity=1, stages=OFF_POLICY, **creation) as writer:
        put(writer, outputs)
    run = storage.open_run(tmp_path / "run")
    assert run[0].minibatches().context_rows is None
    assert run[0].transitions().num_rows == 12
    with pytest.raises(storage.StageMissing, match="no context"):
        run[0].transitions(context=True)


@pytest.mark.parametrize("lost", [StageRef(1, "collect_rollouts", 1), StageRef(0, "fill_memory")])
def test_rows_behind_a_round_that_was_lost_are_not_counted_wrongly(make_off_policy_run, lost):
    path = make_off_policy_run(3)
    (path / "_commits" / lost.file_name).unlink()
    run = storage.open_run(path)
    with pytest.raises(storage.StageMissing, match=re.escape(f"{lost} is not stored")):
        run.transitions([0])


@pytest.mark.parametrize("length", [-1, 6])
def test_impossible_lengths_are_damage(run, monkeypatch, length):
    of = type(run.files).read_row

    def forged(files, record, chunk, *tasks):
        values, attributes = of(files, record, chunk, *tasks)
        return (values * 0 + length, attributes) if chunk.array == "rollouts_0/lengths" else (values, attributes)

    monkeypatch.setattr(type(run.files), "read_row", forged)
    with pytest.raises(storage.DamagedRun, match="episodes of at most 5 steps"):
        run.transitions([60])


def test_lengths_and_task_ids_are_known_without_reading_anything_else(run):
    rounds = list(stored_rounds(run))
    assert [round.ref for round in rounds] == [
        StageRef(0, "fill_memory"),
        *(StageRef(i, "collect_rollouts", k) for i in range(3) for k in range(2)),
    ]
    assert rounds[0].task_ids is None
    for round in rounds[1:]:
        assert (round.lengths == run[round.ref.iteration].rollouts(round.ref.step).lengths).all()
        assert (round.task_ids == run[round.ref.iteration].tasks().ids).all()


def test_choices_come_back_as_numbers(tmp_path, creation, put, make_batches):
    batches, rng = make_batches(B=1, E=1), np.random.default_rng(0)
    from dataclasses import replace

    def with_choices(value):
        shape = value.rewards.shape
        values = rng.random((*shape, 3), np.float32)
        return replace(
            value,
            actions=rng.integers(0, 3, shape) * value.mask.astype(np.int64),
            behavior={"action_values": values, "epsilon": np.array([0.5], np.float32)},
        )

    outputs = [
        (ref, with_choices(value) if ref.stage in ("fill_memory", "collect_rollouts") else value, inputs)
        for ref, value, inputs in batches.off_policy_iteration(0, rounds=1)
    ]
    with storage.create_run(tmp_path / "run", capacity=1, stages=OFF_POLICY, **creation) as writer:
        put(writer, outputs)
    run = storage.open_run(tmp_path / "run")
    fill = run[0].memory_fill()
    assert run.transitions([0, 1])["action"].to_pylist() == fill.actions[0, 0, :2].tolist()
    assert run.steps().column_names[6:8] == ["action", "action_values"]
