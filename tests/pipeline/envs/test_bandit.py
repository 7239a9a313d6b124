"""Bandits pay as their tasks say, and the strategies to compare with earn what they are known to earn."""

import numpy as np
import pytest
from bandit_references import REFERENCES, earned, gittins_indices, reference_return

from metaloom.pipeline.envs.bandit import BernoulliBandit
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_batch_env, make_env


def test_an_arm_pays_as_often_as_its_task_says():
    batch = make_batch_env(EnvConfig(name="bernoulli-bandit", options={"arms": 3}), 2000)
    batch.reset(np.tile([0.1, 0.5, 0.9], (2000, 1)), np.arange(2000, dtype=np.uint64))
    rows, arms = np.arange(2000), np.arange(2000) % 3
    paid = np.mean([batch.step(arms, rows).reward_terms["payout"] for _ in range(100)], axis=0)
    for arm, expected in enumerate((0.1, 0.5, 0.9)):
        # 66,667 pulls: the standard error is below 0.002.
        assert paid[arms == arm].mean() == pytest.approx(expected, abs=0.008)


def test_the_same_seed_pays_the_same_whatever_was_pulled_before():
    env = BernoulliBandit(2)
    env.set_task(np.array([0.5, 0.5]))
    payouts = []
    for arms in ([0, 0, 1], [1, 0, 1]):
        env.reset(seed=3)
        payouts.append([env.step(arm)[1] for arm in arms])
    assert payouts[0] == payouts[1]


def test_a_pull_pays_if_its_draw_is_below_the_probability():
    env = BernoulliBandit(2)
    draw = np.random.default_rng(3).random()
    env.set_task(np.array([draw, np.nextafter(draw, 1)]))
    for arm in (0, 1):
        env.reset(seed=3)
        assert env.step(arm)[1] == arm


def test_one_arm_is_no_bandit_and_discrete_actions_have_no_scale():
    for arms in (1, 2.5, True, "5", None):
        with pytest.raises(EnvError, match=f"arms must be an integer >= 2, got {arms!r}"):
            make_env(EnvConfig(name="bernoulli-bandit", options={"arms": arms}))
    with pytest.raises(EnvError, match=r"actions Discrete\(5\) are discrete and cannot be scaled"):
        make_env(EnvConfig(name="bernoulli-bandit", action_scale=1.0))


def test_an_index_is_the_sure_payout_that_one_would_as_soon_have():
    indices = gittins_indices(2, num_levels=10_000)
    # With one pull to come it is the mean of the posterior.
    assert indices[0, 0, 1] == pytest.approx(1 / 2, abs=1e-3)
    assert indices[1, 0, 1] == pytest.approx(2 / 3, abs=1e-3)
    # With two: ½ (1 + 2/3) + ½ λ = 2 λ, since one goes on after a payout and leaves after a miss.
    assert indices[0, 0, 2] == pytest.approx(5 / 9, abs=1e-3)


@pytest.mark.parametrize(
    ("arms", "name", "expected"),
    [
        # Exact: of random n / 2; of the Bayes-optimal strategy by dynamic programming, which Gittins' is next to.
        (5, "random", 5.0),
        (5, "gittins", 6.660),
        (10, "gittins", 6.714),
        # Computed independently of this, with standard errors of 0.006.
        (5, "greedy", 6.627),
        (10, "greedy", 6.690),
        (5, "thompson", 5.833),
        (10, "thompson", 5.579),
    ],
)
def test_strategies_earn_what_they_are_known_to_in_ten_pulls(arms, name, expected):
    mean, error = reference_return(name, arms=arms, num_pulls=10, num_bandits=40_000)
    assert error < 0.012
    assert mean == pytest.approx(expected, abs=4 * np.hypot(error, 0.006))


def test_ucb1_pulls_every_arm_before_any_again():
    rng = np.random.default_rng(0)
    # With as many pulls as arms it is a pull of each, whatever they pay.
    probabilities = rng.integers(2, size=(50, 4)).astype(float)
    assert np.array_equal(earned(REFERENCES["ucb1"], probabilities, 4, rng), probabilities.sum(1))
