import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaloom.pipeline.replay.index import ReplayError, RowIndex, TaskIndex

TASKS = 3


@st.composite
def histories(draw):
    """Rounds of collection as (iteration, task ids, lengths, in_context), in order; -1 fills the buffer."""
    history = []
    for iteration in range(-1, draw(st.integers(0, 3))):
        for _ in range(1 if iteration < 0 else draw(st.integers(0, 3))):
            task_ids = draw(st.lists(st.integers(0, TASKS - 1), min_size=1, max_size=3))
            episodes = st.lists(st.integers(0, 3), min_size=2, max_size=2)
            lengths = np.array([draw(episodes) for _ in task_ids], np.int32)
            lengths[0, 0] += not lengths.any()
            history.append((iteration, task_ids, lengths, draw(st.booleans())))
    return history


def build(history) -> TaskIndex:
    index = TaskIndex()
    for iteration, task_ids, lengths, in_context in history:
        index.append(iteration, task_ids, lengths, in_context=in_context)
    return index


def steps_of(history):
    """A plain list of all steps: (round's number, b, e, t, iteration, task, whether it is context)."""
    return [
        (number, b, e, t, iteration, task_ids[b], in_context)
        for number, (iteration, task_ids, lengths, in_context) in enumerate(history)
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
@given(history=histories(), size=st.integers(1, 12))
def test_buffers_are_those_of_a_plain_list_as_of_every_iteration(history, size: int) -> None:
    index, steps = build(history), steps_of(history)
    for iteration in range(-1, 5):
        view = index.as_of(iteration)
        known = [s for s in steps if s[4] <= iteration]
        for task in range(TASKS):
            mine = [row for row, s in enumerate(known) if s[5] == task]
            assert all_rows(view.rows(task, size)) == mine[-size:]
            context = [row for row in mine if known[row][6]]
            latest = [row for row in context if known[row][4] == known[context[-1]][4]]
            assert all_rows(view.context(task)) == latest


@settings(max_examples=100, deadline=None)
@given(history=histories())
def test_rows_are_found_where_the_batches_have_them(history) -> None:
    index, steps = RowIndex(), steps_of(history)
    for _, _, lengths, _ in history:
        index.append(lengths)
    assert (index.num_rows, len(index)) == (len(steps), len(history))
    located = index.locate(np.arange(len(steps))[::-1])
    assert list(zip(*(axis.tolist() for axis in located), strict=True)) == [s[:4] for s in steps[::-1]]
    for number in range(len(history)):
        assert list(index.rows_of(number)) == [row for row, s in enumerate(steps) if s[0] == number]


def test_a_view_stays_as_it_was_while_the_index_grows() -> None:
    index = TaskIndex()
    index.append(-1, [7, 8], np.array([[2], [3]]), in_context=True)
    view = index.as_of(0)
    index.append(1, [7], np.array([[4]]), in_context=True)
    assert all_rows(view.rows(7, 100)) == all_rows(view.context(7)) == [0, 1]
    assert all_rows(index.as_of(1).rows(7, 3)) == [6, 7, 8]
    assert all_rows(index.as_of(1).rows(7, 5)) == [1, 5, 6, 7, 8]
    # Task 7 was picked, task 8 was not: its context is still the fill.
    assert all_rows(index.as_of(1).context(7)) == [5, 6, 7, 8]
    assert all_rows(index.as_of(1).context(8)) == [2, 3, 4]


def test_picking_a_task_in_iteration_0_replaces_the_fill_as_its_context() -> None:
    index = TaskIndex()
    for iteration, in_context in ((-1, True), (0, True), (0, False), (0, True)):
        index.append(iteration, [0], np.array([[2]]), in_context=in_context)
    assert all_rows(index.as_of(0).context(0)) == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("iteration", "task_ids", "lengths", "message"),
    [
        (1, [0], [[1]], "iteration 1 after iteration 2"),
        (3, [0, 1], [[1]], r"shape \(1, 1\) for 2 tasks"),
        (3, [0], [[0, 0]], "minimum 0 and sum 0"),
        (3, [0], [[2, -1]], "minimum -1"),
        (3, [0], [2], r"shape \(1,\)"),
    ],
)
def test_impossible_rounds_are_refused(iteration, task_ids, lengths, message: str) -> None:
    index = TaskIndex()
    index.append(2, [0], np.array([[1]]), in_context=False)
    with pytest.raises(ReplayError, match=message):
        index.append(iteration, task_ids, np.array(lengths), in_context=False)
    assert len(index) == 1


@pytest.mark.parametrize("rows", [[-1], [0, 4]])
def test_rows_that_a_run_does_not_have_are_refused(rows) -> None:
    index = RowIndex()
    index.append(np.array([[4]]))
    with pytest.raises(ReplayError, match="the replay buffer has 0 to 3"):
        index.locate(np.array(rows))
