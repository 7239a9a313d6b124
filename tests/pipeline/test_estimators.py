import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from metaloom.pipeline.estimation.diagnostics import explained_variance
from metaloom.pipeline.estimation.returns import (
    discounted_returns,
    discounted_rewards,
    gae,
    normalize,
    shift_positive,
)

FACTORS = st.floats(0, 1)
NUMBERS = st.floats(-100, 100, width=32)
REWARDS = arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 12)), elements=NUMBERS)


def random_values(rewards):
    rng = np.random.default_rng(rewards.size)
    return rng.standard_normal((rewards.shape[0], rewards.shape[1] + 1))


def test_returns_of_four_steps_by_hand():
    # 4 + 0; 2 + 0.5 * 4; 0 + 0.5 * 4; 1 + 0.5 * 2
    np.testing.assert_array_equal(discounted_returns(np.array([1.0, 0.0, 2.0, 4.0]), 0.5), [2.0, 2.0, 4.0, 4.0])


@given(REWARDS, FACTORS)
def test_returns_are_the_discounted_sums_of_their_definition(rewards, discount):
    T = rewards.shape[1]
    expected = np.array([[sum(discount ** (k - t) * row[k] for k in range(t, T)) for t in range(T)] for row in rewards])
    np.testing.assert_allclose(discounted_returns(rewards, discount), expected, rtol=1e-9, atol=1e-9)


def test_returns_are_float64_and_leave_their_input_alone():
    rewards = np.ones((2, 3), np.float32)
    rewards.flags.writeable = False
    assert discounted_returns(rewards, 0.9).dtype == np.float64


@given(REWARDS, FACTORS)
def test_gae_with_lambda_one_is_returns_minus_values_when_the_end_is_worth_nothing(rewards, discount):
    values = random_values(rewards)
    values[:, -1] = 0
    expected = discounted_returns(rewards, discount) - values[:, :-1]
    np.testing.assert_allclose(
        gae(rewards, values[..., :-1], values[..., 1:], discount, 1.0), expected, rtol=1e-9, atol=1e-9
    )


@given(REWARDS, FACTORS)
def test_gae_with_lambda_zero_is_the_one_step_error(rewards, discount):
    values = random_values(rewards)
    expected = rewards + discount * values[:, 1:] - values[:, :-1]
    np.testing.assert_allclose(
        gae(rewards, values[..., :-1], values[..., 1:], discount, 0.0), expected, rtol=1e-12, atol=1e-12
    )


@given(REWARDS, FACTORS, FACTORS)
def test_padding_changes_no_real_advantage_and_stays_zero(rewards, discount, gae_lambda):
    values = random_values(rewards)
    values[:, -1] = 0
    arrays = rewards, values[..., :-1], values[..., 1:]
    padded = gae(*(np.pad(array, [(0, 0), (0, 3)]) for array in arrays), discount, gae_lambda)
    np.testing.assert_array_equal(padded[:, : rewards.shape[1]], gae(*arrays, discount, gae_lambda))
    assert not padded[:, rewards.shape[1] :].any()


def test_normalizing_uses_real_entries_only():
    values, mask = np.array([[1.0, 3.0, 50.0], [5.0, 7.0, 9.0]]), np.array([[1, 1, 0], [1, 1, 1]])
    normalized = normalize(values, mask)
    real = normalized[mask == 1]
    assert abs(real.mean()) < 1e-12
    assert abs(real.std() - 1) < 1e-7
    assert normalized[0, 2] == 0


def test_equal_values_normalize_to_zero_instead_of_nan():
    assert not normalize(np.full((2, 2), 3.0), np.ones((2, 2))).any()


def test_the_smallest_shifted_real_value_is_1e_8_and_padding_stays_zero():
    values, mask = np.array([[-2.0, 3.0, -50.0]]), np.array([[1, 1, 0]])
    np.testing.assert_allclose(shift_positive(values, mask), [[1e-8, 5.0 + 1e-8, 0]], rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 2.0, 3.0], 1.0), ([2.0, 2.0, 2.0], 0.0), ([3.0, 2.0, 1.0], -3.0)]
)
def test_explained_variance_is_one_for_a_perfect_fit_and_zero_for_a_constant(values, expected):
    returns, mask = np.array([1.0, 2.0, 3.0, 99.0]), np.array([1, 1, 1, 0])
    assert explained_variance(np.array([*values, 0.0]), returns, mask) == pytest.approx(expected)


def test_explained_variance_of_constant_returns_is_zero():
    assert explained_variance(np.zeros(3), np.ones(3), np.ones(3)) == 0


def test_discounted_rewards_count_time_from_the_start_of_the_episode():
    rewards = np.array([[3.0, 5.0, 7.0], [1.0, 0.0, 2.0]])
    np.testing.assert_array_equal(discounted_rewards(rewards, 0.5), [[3.0, 2.5, 1.75], [1.0, 0.0, 0.5]])
    np.testing.assert_array_equal(discounted_rewards(rewards, 0.0), [[3.0, 0.0, 0.0], [1.0, 0.0, 0.0]])


@given(REWARDS, FACTORS)
def test_discounted_rewards_sum_to_the_return_from_the_first_step(rewards, discount):
    found = discounted_rewards(rewards, discount).sum(-1)
    np.testing.assert_allclose(found, discounted_returns(rewards, discount)[:, 0], rtol=1e-9, atol=1e-9)


def test_normalizing_by_the_variance_divides_by_its_unbiased_estimate():
    # Real entries 1, 3, 8: mean 4, unbiased variance (9 + 1 + 16) / 2 = 13.
    values, mask = np.array([1.0, 3.0, 8.0, 100.0]), np.array([1.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(normalize(values, mask, "variance"), np.array([-3, -1, 4, 0]) / 13, rtol=1e-8)
    # Without the third: mean 2, unbiased variance (1 + 1) / 1.
    mask[2] = 0
    np.testing.assert_allclose(normalize(values, mask, "variance"), [-0.5, 0.5, 0, 0], rtol=1e-7)


def test_a_single_value_is_normalized_to_zero_by_either_scale():
    for scale in ("std", "variance"):
        np.testing.assert_array_equal(normalize(np.array([3.0, 0.0]), np.array([1.0, 0.0]), scale), [0.0, 0.0])
