import numpy as np
import pytest

from metaloom.pipeline.replay.buffer import TransitionColumns
from metaloom.pipeline.types import EpisodeBatch


def episodes(actions: np.ndarray) -> EpisodeBatch:
    """One task, a terminated episode of 3 steps and a truncated one of 2; every number of an observation differs."""
    return EpisodeBatch(
        observations=np.arange(16, dtype=np.float32).reshape(1, 2, 4, 2),
        actions=actions,
        rewards=np.float32([[[0.5, 1.5, 2.5], [3.5, 4.5, 0]]]),
        terminated=np.array([[True, False]]),
        truncated=np.array([[False, True]]),
        lengths=np.int32([[3, 2]]),
        behavior={},
        reward_terms={},
        initial_state=np.zeros((1, 2, 0)),
    )


STEPS = tuple(np.array(axis) for axis in ([0, 0, 0, 0], [0, 0, 1, 1], [1, 2, 0, 1]))


def test_a_row_holds_a_step_and_the_observation_after_it() -> None:
    actions = np.arange(18, dtype=np.float32).reshape(1, 2, 3, 3) / 7
    columns = TransitionColumns(observation_size=2, action_size=3)
    rows = columns.pack(episodes(actions), *STEPS)
    assert rows.shape == (4, columns.width) == (4, 9)
    assert columns.row_bytes == rows[0].nbytes
    transitions = columns.unpack(rows)
    assert transitions.observations.tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert transitions.next_observations.tolist() == [[4, 5], [6, 7], [10, 11], [12, 13]]
    assert transitions.rewards.tolist() == [1.5, 2.5, 3.5, 4.5]
    assert transitions.terminated.tolist() == [False, True, False, False]
    assert np.array_equal(transitions.actions, actions.reshape(6, 3)[[1, 2, 3, 4]])


def test_discrete_actions_are_exact_below_two_to_the_24() -> None:
    actions = np.array([[[0, 1, 2**24 - 1], [3, 4, 0]]])
    columns = TransitionColumns(observation_size=2, action_size=0)
    assert columns.width == 7
    transitions = columns.unpack(columns.pack(episodes(actions), *STEPS))
    assert transitions.actions.dtype == np.int64
    assert transitions.actions.tolist() == [1, 2**24 - 1, 3, 4]


@pytest.mark.parametrize("leading", [(4,), (2, 2)])
def test_fields_are_contiguous_in_any_leading_shape(leading) -> None:
    columns = TransitionColumns(observation_size=2, action_size=3)
    rows = np.zeros((8, columns.width), np.float32)[::2].reshape(*leading, -1)
    transitions = columns.unpack(rows)
    assert transitions.rewards.shape == leading
    for field in vars(transitions).values():
        assert field.flags.c_contiguous
