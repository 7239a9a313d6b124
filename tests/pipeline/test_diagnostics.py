import numpy as np
import pytest

from metaloom.pipeline.estimation.diagnostics import step_metrics
from metaloom.pipeline.types import EpisodeBatch, Samples, Step


@pytest.fixture
def step():
    """Two tasks of one and two episodes' worth of rewards: returns 3, 1 | 2, 6 after 2, 1 | 2, 2 steps."""
    rewards = np.array([[[1, 2], [1, 0]], [[1, 1], [3, 3]]], np.float32)
    lengths = np.array([[2, 1], [2, 2]], np.int32)
    log_std = np.log(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    episodes = EpisodeBatch(
        observations=np.zeros((2, 2, 3, 1), np.float32),
        actions=np.zeros((2, 2, 2, 2), np.float32),
        rewards=rewards,
        terminated=np.array([[False, True], [False, False]]),
        truncated=np.array([[True, False], [True, True]]),
        lengths=lengths,
        behavior={"mean": np.zeros((2, 2, 2, 2), np.float32), "log_std": log_std},
        reward_terms={},
        initial_state=np.zeros((2, 2, 0)),
    )
    # Discount 0.5: returns at t=0 are 1 + 1, 1, 1 + 0.5, 3 + 1.5.
    returns = np.array([[[2, 2], [1, 0]], [[1.5, 1], [4.5, 3]]], np.float32)
    # Task 0 is predicted perfectly, task 1 by a constant.
    values = np.array([[[2, 2], [1, 0]], [[2, 2], [2, 2]]], np.float32)
    return Step(episodes, Samples(returns, values, returns - values, episodes.mask), 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("average_return", 3.0),
        ("average_discounted_return", (2 + 1 + 1.5 + 4.5) / 4),
        ("std_return", np.std([3, 1, 2, 6])),
        ("max_return", 6),
        ("min_return", 1),
        ("num_episodes", 4),
        ("average_length", 7 / 4),
        ("fraction_truncated", 3 / 4),
        ("explained_variance", 0.5),
        ("policy_std", 2.5),
        ("entropy", np.log([2, 12]).mean() + np.log(2 * np.pi * np.e)),
    ],
)
def test_metrics_of_two_tasks_by_hand(step, name, expected):
    assert step_metrics(step)[f"step_1.{name}"] == pytest.approx(expected, rel=1e-6)


def test_metrics_are_plain_floats_named_after_their_round(step):
    metrics = step_metrics(step)
    assert all(type(value) is float for value in metrics.values())
    assert all(name.startswith("step_1.") for name in metrics)
    assert len(metrics) == 11
