import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from metaloom.pipeline.baselines import BaselineConfig, BaselineError
from metaloom.pipeline.baselines.linear import LinearFeatureBaseline
from metaloom.pipeline.baselines.value_network import ValueNetworkBaseline, _gradient, _initial
from metaloom.pipeline.estimation.diagnostics import explained_variance
from metaloom.pipeline.nn.linearization import LinearizedMLP

SMALL = ValueNetworkBaseline(hidden_sizes=(8,), num_epochs=2, steps_per_minibatch=20)


def returns_of(rng, B, E=6, T=40, O=3):
    """Observations, and returns that no linear function of observations, their squares and time comes close to."""
    observations = rng.uniform(-2, 2, (B, E, T, O)).astype(np.float32)
    signs = np.where(np.arange(B) % 2, 1.0, -1.0)[:, None, None]
    returns = 5 + signs * np.sin(2 * observations[..., 0]) * observations[..., 1] + 0.01 * np.arange(T)
    return observations, returns, np.ones((B, E, T), np.float32)


def mean_explained_variance(predicted, returns, mask):
    return np.mean([explained_variance(*task) for task in zip(predicted, returns, mask, strict=True)])


def ragged(rng, B, E=5, T=12):
    observations, returns, _ = returns_of(rng, B, E, T)
    mask = (np.arange(T) < rng.integers(1, T + 1, (B, E, 1))).astype(np.float32)
    return observations, returns * mask, mask


def test_it_explains_a_nonlinear_return_that_linear_features_do_not():
    episodes = returns_of(np.random.default_rng(0), B=2, E=20, T=60)
    linear, network = (
        mean_explained_variance(baseline.fit_predict(*episodes), *episodes[1:])
        for baseline in (LinearFeatureBaseline(), ValueNetworkBaseline(num_epochs=40))
    )
    assert linear < 0.5
    assert network > 0.9


def test_the_gradient_is_that_of_half_the_weighted_squared_error():
    rng = np.random.default_rng(0)
    networks = [_initial(3, (4, 5), rng) for _ in range(2)]
    params = {name: np.stack([network[name] for network in networks]).astype(np.float64) for name in networks[0]}
    params = {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}
    inputs, goals = rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 1))
    weights = np.stack([rng.random(7) < 0.6, np.arange(7) == 3]).astype(np.float64)

    def loss(values):
        hidden = inputs
        for layer in range(2):
            name = f"value.hidden_{layer}"
            hidden = np.tanh(hidden @ values[f"{name}.kernel"] + values[f"{name}.bias"][:, None])
        errors = (hidden @ values["value.output.kernel"] + values["value.output.bias"][:, None] - goals)[..., 0]
        return (0.5 * errors**2 * weights).sum(1) / weights.sum(1)

    gradients = _gradient(LinearizedMLP("value", 2, params, inputs), goals, weights)
    assert gradients.keys() == params.keys()
    for name, gradient in gradients.items():
        for index in np.ndindex(gradient.shape):
            moved = {key: value.copy() for key, value in params.items()}
            moved[name][index] += 1e-6
            up = loss(moved)
            moved[name][index] -= 2e-6
            expected = (up - loss(moved))[index[0]] / 2e-6
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_sizes": (8, 8)},
        {"hidden_sizes": ()},
        {"num_epochs": 3},
        {"learning_rate": 0.1},
        {"steps_per_minibatch": 10},
        {"shared": True},
    ],
    ids=str,
)
def test_every_option_changes_the_fit(changed):
    episodes = returns_of(np.random.default_rng(0), B=2)
    plain, other = (baseline.fit_predict(*episodes) for baseline in (SMALL, replace(SMALL, **changed)))
    assert abs(plain - other).max() > 1e-3


def test_the_step_size_decays_linearly_from_the_learning_rate_to_zero():
    # The gradient by the only weight that matters stays -1, so Adam moves it by the step size of each of 8 steps.
    targets = np.tile([1.0, -1.0], 50).reshape(1, 100, 1)
    baseline = ValueNetworkBaseline((), num_epochs=4, learning_rate=1e-4, steps_per_minibatch=50)
    weights = baseline.fit(targets[..., None], targets, np.ones((1, 100, 1)))["value.output.kernel"]
    np.testing.assert_allclose(weights, [[[1e-4 * sum(1 - n / 8 for n in range(8))], [0]]], rtol=1e-3)


def test_the_first_kernels_are_glorot_uniform():
    kernel = _initial(20, (40, 40), np.random.default_rng(0))["value.hidden_0.kernel"]
    # Of 800 numbers, the largest is within 2 % of its bound with probability 1 - 1e-7.
    assert 0.98 * np.sqrt(6 / 60) < np.abs(kernel).max() < np.sqrt(6 / 60)


def test_minibatches_are_drawn_by_the_seed():
    # Without hidden layers, networks start at zero whatever the seed.
    episodes = returns_of(np.random.default_rng(0), B=1)
    linear = replace(SMALL, hidden_sizes=())
    assert abs(linear.fit_predict(*episodes, seed=3) - linear.fit_predict(*episodes, seed=4)).max() > 1e-4


def test_the_seed_is_0_where_none_is_given():
    episodes = returns_of(np.random.default_rng(0), B=1)
    configured = BaselineConfig(name="value_network", hidden_sizes=(8,), num_epochs=2, steps_per_minibatch=20)
    fitted = SMALL.fit(*episodes, seed=0)
    for baseline in (SMALL, configured):
        np.testing.assert_array_equal(baseline.fit_predict(*episodes), SMALL.fit_predict(*episodes, seed=0))
        for name, value in baseline.fit(*episodes).items():
            np.testing.assert_array_equal(value, fitted[name])


def test_more_epochs_fit_better():
    episodes = returns_of(np.random.default_rng(0), B=2)
    fits = [replace(SMALL, num_epochs=n).fit_predict(*episodes) for n in (1, 5, 50)]
    first, second, third = (mean_explained_variance(fit, *episodes[1:]) for fit in fits)
    assert first < second < third


def test_one_network_per_task_tells_tasks_apart_and_a_shared_one_cannot():
    episodes = returns_of(np.random.default_rng(0), B=2, E=10)
    own, shared = (
        ValueNetworkBaseline(num_epochs=60, shared=shared).fit_predict(*episodes) for shared in (False, True)
    )
    # The two tasks differ in the sign of all that depends on the observation.
    assert mean_explained_variance(own, *episodes[1:]) > 0.8
    assert mean_explained_variance(shared, *episodes[1:]) < 0.5


def test_the_bits_depend_on_the_seed_and_on_nothing_else():
    episodes = ragged(np.random.default_rng(0), B=9)
    expected = SMALL.fit_predict(*episodes, seed=3)
    np.testing.assert_array_equal(SMALL.fit_predict(*episodes, seed=3), expected)
    assert abs(SMALL.fit_predict(*episodes, seed=4) - expected).max() > 1e-3
    with ThreadPoolExecutor(3) as pool:
        np.testing.assert_array_equal(SMALL.fit_predict(*episodes, seed=3, parallel=pool.map), expected)


def test_all_sixty_four_bits_of_a_seed_count():
    episodes = returns_of(np.random.default_rng(0), B=1)
    first, *others = (SMALL.fit_predict(*episodes, seed=seed) for seed in (2**64 - 1, 2**63 - 1, 2**32 - 1))
    assert all(abs(first - other).max() > 1e-3 for other in others)


def test_the_bits_of_a_task_do_not_depend_on_the_others():
    observations, returns, mask = ragged(np.random.default_rng(0), B=9)
    expected = SMALL.fit_predict(observations, returns, mask)
    others = np.array([False, *[True] * 8])
    changed = np.where(others[:, None, None], returns[::-1] * 3, returns) * mask
    np.testing.assert_array_equal(SMALL.fit_predict(observations, changed, mask)[0], expected[0])
    np.testing.assert_array_equal(SMALL.fit_predict(observations[:6], returns[:6], mask[:6])[4:], expected[4:6])


def test_tasks_of_a_chunk_start_from_different_networks():
    observations, returns, mask = returns_of(np.random.default_rng(0), B=1)
    twice = [np.concatenate([values, values]) for values in (observations, returns, mask)]
    first, second = SMALL.fit_predict(*twice)
    assert abs(first - second).max() > 1e-3


def test_a_shared_network_of_a_single_task_is_the_tasks_own():
    episodes = returns_of(np.random.default_rng(0), B=1)
    np.testing.assert_array_equal(replace(SMALL, shared=True).fit_predict(*episodes), SMALL.fit_predict(*episodes))


def test_constant_returns_are_predicted_exactly():
    observations, returns, mask = returns_of(np.random.default_rng(0), B=1)
    predicted = SMALL.fit_predict(observations, np.full_like(returns, 7.25), mask)
    np.testing.assert_allclose(predicted, 7.25, rtol=1e-12)


def test_the_unit_of_the_returns_does_not_matter():
    observations, returns, mask = returns_of(np.random.default_rng(0), B=1)
    plain, large = (SMALL.fit_predict(observations, scale * returns, mask) for scale in (1, 1e4))
    np.testing.assert_allclose(large, 1e4 * plain, rtol=1e-4)


def test_a_fit_that_diverges_is_refused_by_task():
    observations, returns, mask = returns_of(np.random.default_rng(0), B=6)
    returns[:5] = 1  # predicted by any network whose output is zero
    with np.errstate(all="ignore"), pytest.raises(BaselineError, match=r"task 5: .* lower baseline\.learning_rate"):
        replace(SMALL, learning_rate=1e30, num_epochs=5).fit_predict(observations, returns, mask)


def test_baselines_do_not_import_torch():
    code = "import sys, metaloom.pipeline.baselines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shared", [False, True])
def test_fitted_parameters_give_the_predictions_again(shared):
    rng = np.random.default_rng(0)
    observations, targets = rng.normal(size=(5, 3, 20, 2)), rng.normal(size=(5, 3, 20))
    observations[:, 0, :2, 0] = 50, -50
    observations[..., 1] *= 1e-8  # as small as what keeps a constant input from division by zero
    mask = np.ones((5, 3, 20), np.float32)
    baseline = ValueNetworkBaseline((4,), num_epochs=2, shared=shared)
    predicted = baseline.fit_predict(observations, targets, mask, seed=3)
    params = baseline.fit(observations, targets, mask, seed=3)
    assert {len(value) for value in params.values()} == {1 if shared else 5}
    np.testing.assert_allclose(params["target_std"][:, 0, 0], targets.reshape(1 if shared else 5, -1).std(1))
    assert params["target_std"].shape[1:] == (1, 1)
    assert params["input_std"].shape[1:] == (1, 3)
    time = np.broadcast_to(np.arange(20)[:, None] / 100, (5, 3, 20, 1))
    inputs = np.concatenate([np.clip(observations, -10, 10), time], -1).reshape(len(params["input_mean"]), -1, 3)
    x = (inputs - params["input_mean"]) / (params["input_std"] + 1e-8)
    hidden = np.tanh(x @ params["value.hidden_0.kernel"] + params["value.hidden_0.bias"][:, None])
    outputs = hidden @ params["value.output.kernel"] + params["value.output.bias"][:, None]
    outputs = outputs * params["target_std"] + params["target_mean"]
    np.testing.assert_allclose(outputs.reshape(predicted.shape), predicted, atol=1e-5)
