from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.algorithms.off_policy.settings import Filling, OffPolicyPlan
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns
from metaloom.pipeline.replay.index import ReplayError, TaskIndex
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Minibatches
from metaloom.stages.memory.replay import Collected, StoredReplay
from metaloom.stages.sample_transitions import draw_transitions


def filled(tasks: int = 6, steps: int = 20) -> TaskIndex:
    """The fill of a run: so many steps of every task in two episodes."""
    index = TaskIndex()
    lengths = np.tile([[steps // 4, steps - steps // 4]], (tasks, 1))
    index.append(-1, range(tasks), lengths, in_context=True)
    return index


def draw(index: TaskIndex, **changes):
    at = At(changes.pop("run_seed", 3), changes.pop("iteration", 0))
    task_ids, steps = changes.pop("task_ids", range(6)), {"num_updates": 8, "max_updates": 8}
    steps |= {name: changes.pop(name) for name in steps if name in changes}
    sizes = {"tasks_per_gradient_step": 4, "batch_size": 16, "context_size": 5, "memory_size": 1000}
    plan = OffPolicyPlan(Filling("uniform"), (), None, **(sizes | changes))
    return draw_transitions(index.as_of(at.iteration), plan, at, task_ids, **steps)


def test_rows_are_from_the_buffer_of_their_task() -> None:
    drawn = draw(filled())
    assert drawn.num_updates == 8
    assert np.array_equal(drawn.rows // 20, np.broadcast_to(drawn.task_ids[..., None], drawn.rows.shape))
    assert np.array_equal(drawn.context_rows // 20, np.broadcast_to(drawn.task_ids[..., None], (8, 4, 5)))


def test_the_tasks_of_a_gradient_step_are_different_and_all_tasks_have_their_turn() -> None:
    task_ids = draw(filled(), num_updates=600, max_updates=600).task_ids
    assert all(len(set(step)) == 4 for step in task_ids.tolist())
    counts = np.bincount(task_ids.ravel())
    # 4 of 6 tasks in 600 steps: 400 each with standard deviation sqrt(600 * 2/3 * 1/3) = 11.5.
    assert np.abs(counts - 400).max() < 4 * 11.5


def test_rows_are_uniform_over_the_newest_buffer_size_rows() -> None:
    index = filled(tasks=1, steps=60)
    rows = draw(index, task_ids=[0], tasks_per_gradient_step=1, context_size=0, memory_size=50, batch_size=2500).rows
    counts = np.bincount(rows.ravel(), minlength=60)
    assert not counts[:10].any()
    # 85.35 is exceeded with probability 0.001 at 49 degrees of freedom.
    assert ((counts[10:] - 400) ** 2 / 400).sum() < 85.35


def test_context_has_no_row_twice_where_there_are_enough() -> None:
    drawn = draw(filled(), context_size=20)
    assert np.array_equal(np.sort(drawn.context_rows) % 20, np.broadcast_to(np.arange(20), (8, 4, 20)))


def test_context_repeats_rows_where_there_are_too_few() -> None:
    index = filled()
    index.append(1, range(6), np.full((6, 1), 3), in_context=True)
    drawn = draw(index, iteration=1, context_size=50)
    first = 120 + 3 * drawn.task_ids[..., None]
    assert set(np.unique(drawn.context_rows - first)) == {0, 1, 2}


def test_context_is_drawn_on_its_own() -> None:
    index = filled(steps=8)  # fewer than are drawn, so both are drawn with replacement
    alone, together = draw(index, context_size=0), draw(index, context_size=16)
    assert alone.context_rows is None
    assert np.array_equal(alone.rows, together.rows)
    order = generator(3, "minibatches", 0, 0).random((8, 6)).argsort(axis=1)
    assert np.array_equal(together.task_ids, order[:, :4])
    for purpose, rows in ((1, together.rows), (2, together.context_rows)):
        places = (8 * generator(3, "minibatches", 0, purpose).random((8, 4, 16))).astype(int)
        assert np.array_equal(rows, 8 * order[:, :4, None] + places)


def test_more_updates_only_prolong_and_what_follows_them_is_empty() -> None:
    index = filled()
    few, many = draw(index, num_updates=3), draw(index)
    assert few.num_updates == 3
    assert draw(index, num_updates=1).num_updates == 1
    for name in ("rows", "task_ids", "context_rows"):
        assert np.array_equal(getattr(few, name)[:3], getattr(many, name)[:3])
        assert (getattr(few, name)[3:] == -1).all()
        assert (getattr(many, name) >= 0).all()


def test_an_iteration_draws_the_same_when_the_run_has_gone_on() -> None:
    index = filled()
    before = draw(index)
    index.append(1, range(6), np.full((6, 1), 9), in_context=True)
    again = draw(index)
    for name in ("rows", "task_ids", "context_rows"):
        assert np.array_equal(getattr(before, name), getattr(again, name))


def test_seed_and_iteration_decide_the_draws() -> None:
    index = filled()
    assert not np.array_equal(draw(index).rows, draw(index, run_seed=4).rows)
    assert not np.array_equal(draw(index).rows, draw(index, iteration=1).rows)
    orders = [draw(index, **at).task_ids.tobytes() for at in ({}, {"run_seed": 4}, {"iteration": 1})]
    assert len({*orders}) == 3
    # With a single task, the order of tasks is the same in all draws, so the rows themselves must differ.
    one = {"task_ids": [0], "tasks_per_gradient_step": 1}
    for name in ("rows", "context_rows"):
        drawn = [getattr(draw(index, **one, **at), name) for at in ({}, {"run_seed": 4}, {"iteration": 1})]
        assert not any(np.array_equal(drawn[0], other) for other in drawn[1:])
        assert len({step.tobytes() for step in drawn[0]}) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_ids": range(3)}, "got 3 training tasks; each gradient step requires at least 4"),
        ({"task_ids": [0, 1, 2, 2]}, "got 3 training tasks; each gradient step requires at least 4"),
        ({"task_ids": range(8)}, "the replay buffer of 2 of 8 tasks is empty, starting with task 6"),
        ({"num_updates": 9}, "got 9 gradient steps; expected 1 to 8"),
        ({"num_updates": 0}, "got 0 gradient steps; expected 1 to 8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message: str) -> None:
    with pytest.raises(ReplayError, match=f"sample_transitions of iteration 0: {message}"):
        draw(filled(), **changes)


def test_a_task_without_context_is_refused_where_tasks_are_inferred() -> None:
    index = TaskIndex()
    index.append(-1, range(6), np.full((6, 1), 3), in_context=False)
    assert draw(index, context_size=0).num_updates == 8
    with pytest.raises(ReplayError, match="the context of 6 of 6 tasks is empty"):
        draw(index)


def test_a_view_has_no_batch_of_later_iterations_whatever_was_drawn_from_them_before() -> None:
    lengths = {StageRef(i, "collect_rollouts", k): np.array([[i + 1, 2]]) for i in range(3) for k in range(2)}

    def until(last):
        span = SimpleNamespace(last=last)
        return SimpleNamespace(
            span=span, refs=lambda i: [ref for ref in lengths if ref.iteration == i], lengths=lengths.__getitem__
        )

    def collected(ref, num_tasks):
        asked.append(ref)
        return Collected(ref.iteration, np.zeros(num_tasks, np.int64), in_context=True)

    asked: list[StageRef] = []
    replay = StoredReplay(ReplayBuffer(TransitionColumns(1, 1), cache_bytes=1000, max_rows=100))
    none = Minibatches(np.zeros((0, 1, 2), np.int64), np.zeros((0, 1), np.int64))
    assert [*replay.minibatches(until(2), none)] == []
    assert len(replay.view(until(1), collected).rows(0, 100)) == 14
    assert asked == [ref for ref in lengths if ref.iteration < 2]
    assert len(replay.view(until(2), collected).rows(0, 100)) == 24
    assert asked == [*lengths]
