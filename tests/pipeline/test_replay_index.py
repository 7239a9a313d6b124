import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaloom.pipeline.replay.index import ReplayError, ReplayIndex, Round

TASKS = 3


@st.composite
def histories(draw):
    """Rounds of collection as (round, task ids, lengths, in_context), in order."""
    history = []
    for iteration in range(draw(st.integers(1, 4))):
        stages = [("collect_rollouts", k) for k in range(draw(st.integers(0, 3)))]
        for stage, k in [("fill_memory", 0), *stages] if iteration == 0 else stages:
            task_ids = draw(st.lists(st.integers(0, TASKS - 1), min_size=1, max_size=3))
            episodes = st.lists(st.integers(0, 3), min_size=2, max_size=2)
            lengths = np.array([draw(episodes) for _ in task_ids], np.int32)
            lengths[0, 0] += not lengths.any()
            history.append((Round(iteration, stage, k), task_ids, lengths, draw(st.booleans())))
    return history


def build(history) -> ReplayIndex:
    index = ReplayIndex()
    for round, task_ids, lengths, in_context in history:
        index.append(round, task_ids, lengths, in_context=in_context)
    return index


def steps_of(history):
    """A plain list of all steps: (round's number, b, e, t, task, phase of context or None)."""
    return [
        (number, b, e, t, task_ids[b], round[:2] if in_context else None)
        for number, (round, task_ids, lengths, in_context) in enumerate(history)
        for b in range(len(task_ids))
        for e in range(lengths.shape[1])
        for t in range(lengths[b, e])
    ]


def all_rows(chosen) -> list[int]:
    few, many = np.arange(len(chosen)), np.arange(len(chosen) + 1) % max(len(chosen), 1)
    if len(chosen):  # both ways of looking up
        assert chosen.at(many)[:-1].tolist() == chosen.at(few).tolist()
    return chosen.at(few).tolist() if len(chosen) else []


@settings(max_examples=150, deadline=None)
@given(history=histories(), memory_size=st.integers(1, 12))
def test_memories_are_those_of_a_plain_list_as_of_every_iteration(history, memory_size: int) -> None:
    index, steps = build(history), steps_of(history)
    for iteration in range(5):
        view = index.as_of(iteration)
        known = [s for s in steps if history[s[0]][0].iteration <= iteration]
        for task in range(TASKS):
            mine = [row for row, s in enumerate(known) if s[4] == task]
            assert all_rows(view.memory(task, memory_size)) == mine[-memory_size:]
            phases = [known[row][5] for row in mine if known[row][5]]
            context = [row for row in mine if known[row][5] and known[row][5] == phases[-1]]
            assert all_rows(view.context(task)) == context


@settings(max_examples=100, deadline=None)
@given(history=histories())
def test_rows_are_located_where_the_batches_have_them(history) -> None:
    index, steps = build(history), steps_of(history)
    assert index.num_rows == len(steps)
    assert index.rounds == [round for round, *_ in history]
    located = index.locate(np.arange(len(steps))[::-1])
    assert list(zip(*(axis.tolist() for axis in located), strict=True)) == [s[:4] for s in steps[::-1]]
    for number in range(len(history)):
        assert list(index.rows_of(number)) == [row for row, s in enumerate(steps) if s[0] == number]


def test_a_view_stays_as_it_was_while_the_index_grows() -> None:
    index = ReplayIndex()
    first = index.append(Round(0, "fill_memory", 0), [7, 8], np.array([[2], [3]]), in_context=True)
    view = index.as_of(0)
    index.append(Round(1, "collect_rollouts", 0), [7], np.array([[4]]), in_context=True)
    assert first == range(0, 5)
    assert all_rows(view.memory(7, 100)) == all_rows(view.context(7)) == [0, 1]
    assert all_rows(index.as_of(1).memory(7, 3)) == [6, 7, 8]
    assert all_rows(index.as_of(1).memory(7, 5)) == [1, 5, 6, 7, 8]
    # Task 7 was picked, task 8 was not: its context is still the fill.
    assert all_rows(index.as_of(1).context(7)) == [5, 6, 7, 8]
    assert all_rows(index.as_of(1).context(8)) == [2, 3, 4]


def test_picking_a_task_in_iteration_0_replaces_the_fill_as_its_context() -> None:
    index = ReplayIndex()
    index.append(Round(0, "fill_memory", 0), [0], np.array([[2]]), in_context=True)
    index.append(Round(0, "collect_rollouts", 0), [0], np.array([[2]]), in_context=True)
    index.append(Round(0, "collect_rollouts", 1), [0], np.array([[2]]), in_context=False)
    index.append(Round(0, "collect_rollouts", 2), [0], np.array([[2]]), in_context=True)
    assert all_rows(index.as_of(0).context(0)) == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("round", "task_ids", "lengths", "message"),
    [
        (Round(2, "collect_rollouts", 0), [0], [[1]], "once, in order of collection"),
        (Round(1, "collect_rollouts", 0), [0], [[1]], "once, in order of collection"),
        (Round(3, "collect_rollouts", 0), [0, 1], [[1]], r"shape \(1, 1\) for 2 tasks"),
        (Round(3, "collect_rollouts", 0), [0], [[0, 0]], "no steps"),
        (Round(3, "collect_rollouts", 0), [0], [[2, -1]], "no steps, or fewer than none"),
    ],
)
def test_impossible_rounds_are_refused(round, task_ids, lengths, message: str) -> None:
    index = ReplayIndex()
    index.append(Round(2, "collect_rollouts", 0), [0], np.array([[1]]), in_context=False)
    with pytest.raises(ReplayError, match=message):
        index.append(round, task_ids, np.array(lengths), in_context=False)
    assert index.num_rows == 1


@pytest.mark.parametrize("rows", [[-1], [0, 4]])
def test_rows_that_a_run_does_not_have_are_refused(rows) -> None:
    index = ReplayIndex()
    index.append(Round(0, "collect_rollouts", 0), [0], np.array([[4]]), in_context=False)
    with pytest.raises(ReplayError, match="required 0 to 3"):
        index.locate(np.array(rows))
