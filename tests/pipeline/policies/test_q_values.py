from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from metaloom.pipeline.policies.actors.off_policy import QValuesActor

B, E, O, NUM_ACTIONS = 3, 4, 5, 4


def epsilon(*values: float) -> dict[str, np.ndarray]:
    return {"epsilon": np.float32(values)}


def act(actor, observations: np.ndarray) -> np.ndarray:
    T, N = actor.actions.shape
    return np.array([actor.act(t, observations, np.arange(N)) for t in range(T)])


def test_action_values_are_those_of_the_relu_network_and_the_highest_is_taken(setup, random_network, relu_network):
    params = random_network("q_network", B, O, NUM_ACTIONS)
    actor = QValuesActor(setup(params | epsilon(0, 0, 0), B=B, E=E, num_actions=NUM_ACTIONS))
    observations = np.random.default_rng(1).normal(size=(B * E, O)).astype(np.float32)
    actions = act(actor, observations)
    expected = np.concatenate(
        [
            relu_network("q_network", params, b)(torch.tensor(observations.reshape(B, E, O)[b]).double()).detach()
            for b in range(B)
        ]
    )
    np.testing.assert_allclose(actor.behavior_by_step["action_values"][0], expected, atol=1e-5)
    np.testing.assert_array_equal(actions[0], expected.argmax(-1))
    assert len(set(actions[0])) > 1
    assert actions.dtype == np.int64


def test_of_equal_values_the_first_is_taken(setup, constant_network):
    params = constant_network("q_network", 1, O, [1, 3, 3, 2]) | epsilon(0)
    assert act(
        QValuesActor(setup(params, B=1, E=2, num_actions=NUM_ACTIONS)), np.zeros((2, O), np.float32)
    ).tolist() == [[1, 1]]


def test_a_task_explores_with_the_probability_of_its_own_epsilon_and_all_actions_alike(setup, constant_network):
    params = constant_network("q_network", B, O, [0, 0, 1, 0]) | epsilon(0, 0.3, 1)
    actor = QValuesActor(setup(params, B=B, E=40, T=200, num_actions=NUM_ACTIONS))
    actions = act(actor, np.zeros((B * 40, O), np.float32)).reshape(200, B, 40)
    n = 200 * 40
    for b, eps in enumerate((0, 0.3, 1)):
        frequencies = np.bincount(actions[:, b].ravel(), minlength=NUM_ACTIONS) / n
        expected = np.full(NUM_ACTIONS, eps / NUM_ACTIONS) + (1 - eps) * np.eye(NUM_ACTIONS)[2]
        np.testing.assert_allclose(frequencies, expected, atol=4 * 0.5 / np.sqrt(n) * (eps > 0))
    assert actor.behavior_by_task["epsilon"].tolist() == np.float32([0, 0.3, 1]).tolist()


def test_without_a_draw_every_action_is_greedy_whatever_epsilon(setup, constant_network):
    params = constant_network("q_network", B, O, [0, 0, 1, 0]) | epsilon(0.9, 0.9, 0.9)
    actor = QValuesActor(setup(params, B=B, E=40, T=5, num_actions=NUM_ACTIONS, draw=False))
    assert (act(actor, np.zeros((B * 40, O), np.float32)) == 2).all()
    assert not actor.behavior_by_task["epsilon"].any()


def test_the_least_draw_does_not_explore_where_epsilon_is_zero(setup, constant_network):
    params = constant_network("q_network", 1, O, [0, 0, 1, 0]) | epsilon(0)
    least = SimpleNamespace(
        random=lambda shape, dtype: np.zeros(shape, dtype), integers=lambda stop, size: np.zeros(size, int)
    )
    actor = QValuesActor(replace(setup(params, B=1, E=2, num_actions=NUM_ACTIONS), rngs=[least]))
    assert act(actor, np.zeros((2, O), np.float32)).tolist() == [[2, 2]]


def test_rows_that_ended_change_nothing_for_the_others_and_leave_no_trace(setup, random_network):
    params = random_network("q_network", B, O, NUM_ACTIONS) | epsilon(0.5, 0.5, 0.5)
    observations = np.random.default_rng(1).normal(size=(B * E, O)).astype(np.float32)
    whole, setup_of_part = (
        QValuesActor(setup(params, B=B, E=E, num_actions=NUM_ACTIONS)),
        setup(params, B=B, E=E, num_actions=NUM_ACTIONS),
    )
    part = QValuesActor(setup_of_part)
    rows = np.array([1, 2, 7])
    expected, found = whole.act(0, observations, np.arange(B * E)), part.act(0, observations, rows)
    np.testing.assert_array_equal(found, expected[rows])
    others = np.setdiff1d(np.arange(B * E), rows)
    assert not part.actions[0, others].any()
    assert not part.behavior_by_step["action_values"][0, others].any()
    np.testing.assert_array_equal(setup_of_part.taken[0, :, 0], part.actions[0])
