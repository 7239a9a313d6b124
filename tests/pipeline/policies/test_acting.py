"""Refusals of actors before they act."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.acting import check_actor, check_actor_params

UNIT, WIDE, DISCRETE = Box(-1, 1, (2,)), Box(-10, 10, (2,)), Discrete(3)
CONTINUOUS_SPACES = Spaces((3,), 1.0, 2, 0)
BELIEF = {"belief.mean": np.zeros((2, 4), np.float32), "belief.variance": np.ones((2, 4), np.float32)}


@pytest.mark.parametrize(
    ("kind", "actions", "message"),
    [
        ("tanh_gaussian", WIDE, r"actor tanh_gaussian: its actions lie in \[-1, 1\], .*set env.action_scale to 1"),
        ("uniform", WIDE, r"actor uniform: its actions lie in \[-1, 1\], .*set env.action_scale to 1"),
        ("uniform", Box(np.float32([-1, -1]), np.float32([1, 2])), "env.action_scale"),
        ("tanh_gaussian", DISCRETE, r"got the action space Discrete\(3\); expected continuous"),
        ("q_values", UNIT, r"got the action space Box.*; expected discrete"),
    ],
)
def test_an_actor_whose_actions_are_not_the_environments_is_refused(kind, actions, message):
    with pytest.raises(ValueError, match=message):
        check_actor(kind, actions)


@pytest.mark.parametrize(
    ("kind", "actions"),
    [("tanh_gaussian", UNIT), ("uniform", UNIT), ("uniform", DISCRETE), ("q_values", DISCRETE), ("policy", WIDE)],
)
def test_an_actor_that_fits_is_accepted(kind, actions):
    check_actor(kind, actions)


def test_uniform_actions_cannot_be_the_most_likely_ones():
    with pytest.raises(ValueError, match="actor uniform: no action is the most likely"):
        check_actor("uniform", UNIT, deterministic=True)


@pytest.mark.parametrize("extra", [{}, BELIEF, BELIEF | {"belief.variance": np.zeros((2, 4), np.float32)}])
def test_a_tanh_gaussian_reads_the_belief_behind_the_observation_and_gives_two_numbers_per_action(
    extra, random_network, config
):
    inputs = 3 + (4 if extra else 0)
    check_actor_params(
        "tanh_gaussian", config, random_network("policy_network", 2, inputs, 4) | extra, CONTINUOUS_SPACES
    )
    with pytest.raises(ValueError, match=rf"hidden_0.kernel: got \(2, 9, 7\); expected \[B, {inputs}, 7\]"):
        check_actor_params(
            "tanh_gaussian", config, random_network("policy_network", 2, 9, 4) | extra, CONTINUOUS_SPACES
        )
    with pytest.raises(ValueError, match=r"output.kernel: got \(2, 5, 2\); expected \[B, 5, 4\]"):
        check_actor_params(
            "tanh_gaussian", config, random_network("policy_network", 2, inputs, 2) | extra, CONTINUOUS_SPACES
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"belief.variance": None}, r"belief.variance: got nothing; expected \[B, 4\]"),
        ({"belief.mean": None}, r"belief.mean: got nothing; expected \[B, 4\]"),
        ({"belief.variance": np.ones((2, 3), np.float32)}, r"belief.variance: got \(2, 3\); expected \[B, 4\]"),
        ({"belief.variance": np.full((2, 4), -0.5, np.float32)}, "got -0.5; expected variances of 0 or more"),
        ({"belief.mean": np.full((2, 4), np.nan, np.float32)}, "belief.mean of task 0 is not finite"),
    ],
)
def test_half_a_belief_or_a_wrong_one_is_refused(changes, message, random_network, config):
    params = random_network("policy_network", 2, 7, 4) | BELIEF | changes
    params = {name: value for name, value in params.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        check_actor_params("tanh_gaussian", config, params, CONTINUOUS_SPACES)


@pytest.mark.parametrize(
    ("epsilon", "message"),
    [
        (None, r"epsilon: got nothing; expected \[B\]"),
        (np.float32([0.1, 1.5]), "expected probabilities, 0 to 1"),
        (np.float32([-0.1, 0.5]), "expected probabilities, 0 to 1"),
        (np.float32([[0.1], [0.5]]), r"epsilon: got \(2, 1\); expected \[B\]"),
    ],
)
def test_an_epsilon_that_is_no_probability_of_each_task_is_refused(epsilon, message, random_network, config):
    params = random_network("q_network", 2, 3, 5)
    check_actor_params("q_values", config, params | {"epsilon": np.float32([0, 1])}, Spaces((3,), 1.0, 0, 5))
    with pytest.raises(ValueError, match=message):
        check_actor_params(
            "q_values", config, params | ({} if epsilon is None else {"epsilon": epsilon}), Spaces((3,), 1.0, 0, 5)
        )
    with pytest.raises(ValueError, match=r"q_network.output.kernel: got \(2, 5, 5\); expected \[B, 5, 6\]"):
        check_actor_params("q_values", config, params | {"epsilon": np.float32([0, 1])}, Spaces((3,), 1.0, 0, 6))


@pytest.mark.parametrize("missing", ["mean", "std"])
def test_normalized_observations_need_both_statistics(missing, random_network, config):
    params = random_network("mean_network", 2, 3, 2) | {"log_std": np.zeros((2, 2), np.float32)}
    params |= {f"normalization.{name}": np.ones((2, 3), np.float32) for name in ("mean", "std")}
    normalized = config.model_copy(update={"normalize_observations": True})
    check_actor_params("policy", normalized, params, CONTINUOUS_SPACES)
    del params[f"normalization.{missing}"]
    check_actor_params("policy", config, params, CONTINUOUS_SPACES)
    with pytest.raises(ValueError, match=rf"normalization\.{missing}: got nothing; expected \[B, 3\]"):
        check_actor_params("policy", normalized, params, CONTINUOUS_SPACES)


def test_uniform_actions_need_no_parameters(config):
    check_actor_params("uniform", config, {}, CONTINUOUS_SPACES)
