from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from metaloom.pipeline.baselines import BaselineConfig, BaselineError
from metaloom.pipeline.baselines.config import BaselineField
from metaloom.pipeline.baselines.linear import LinearFeatureBaseline, LinearTimeBaseline, ZeroBaseline, fit
from metaloom.pipeline.baselines.value_network import ValueNetworkBaseline

BASELINES = {"feature": LinearFeatureBaseline(), "time": LinearTimeBaseline()}


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[2] / "golden" / "linear_baselines.npz") as file:
        return dict(file)


def padded(rows, lengths):
    """Concatenated episodes as [E, T, ...], zero on padding, and their mask [E, T]."""
    result = np.zeros((len(lengths), max(lengths), *rows.shape[1:]))
    for e, episode in enumerate(np.split(rows, np.cumsum(lengths)[:-1])):
        result[e, : len(episode)] = episode
    return result, (np.arange(max(lengths)) < np.asarray(lengths)[:, None]).astype(np.float32)


@pytest.fixture(params=[0, 1, 2])
def task(request, golden):
    prefix = f"task{request.param}_"
    arrays = {name.removeprefix(prefix): value for name, value in golden.items() if name.startswith(prefix)}
    observations, mask = padded(arrays["observations"], arrays["lengths"])
    returns, _ = padded(arrays["returns"], arrays["lengths"])
    return arrays, observations, returns, mask


@pytest.mark.parametrize("kind", BASELINES)
def test_features_agree_with_the_original(task, kind):
    arrays, observations, _, mask = task
    features = BASELINES[kind].features(observations)
    np.testing.assert_allclose(features[mask == 1], arrays[f"{kind}_features"], rtol=1e-14)


@pytest.mark.parametrize("kind", BASELINES)
def test_coefficients_agree_with_the_original_to_1e_8(task, kind, golden):
    arrays, observations, returns, mask = task
    rows = BASELINES[kind].features(observations)[mask == 1]
    coefficients = fit(rows, returns[mask == 1], float(golden["reg_coeff"]))
    np.testing.assert_allclose(coefficients, arrays[f"{kind}_coeffs"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", BASELINES)
def test_predictions_agree_with_the_original_to_1e_8(task, kind):
    arrays, observations, returns, mask = task
    (predicted,) = BASELINES[kind].fit_predict(observations[None], returns[None], mask[None])
    np.testing.assert_allclose(predicted[mask == 1], arrays[f"{kind}_predict"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "baseline",
    [LinearFeatureBaseline(), LinearTimeBaseline(), ZeroBaseline(), ValueNetworkBaseline(num_epochs=2)],
    ids=lambda baseline: type(baseline).__name__,
)
def test_padding_is_ignored_and_predicted_zero(baseline):
    rng = np.random.default_rng(0)
    observations, targets = rng.standard_normal((2, 2, 9, 3)), rng.standard_normal((2, 2, 9))
    mask = (np.arange(9) < np.array([[[4], [9]], [[7], [1]]])).astype(np.float32)
    garbage = np.where(mask[..., None] == 1, observations, 1e6)
    predicted = baseline.fit_predict(garbage, np.where(mask == 1, targets, 1e6), mask)
    np.testing.assert_array_equal(predicted, baseline.fit_predict(observations, targets, mask))
    assert not predicted[mask == 0].any()


def test_a_linear_return_is_fitted_exactly():
    observations = np.random.default_rng(0).uniform(-1, 1, (1, 4, 30, 2))
    targets = 3 * observations[..., 0] - observations[..., 1] ** 2 + 0.1 * np.arange(30) + 2
    predicted = LinearFeatureBaseline(1e-10).fit_predict(observations, targets, np.ones((1, 4, 30)))
    np.testing.assert_allclose(predicted, targets, atol=1e-7)


def test_observations_beyond_ten_count_as_ten():
    observations = np.random.default_rng(0).standard_normal((2, 5, 1))
    observations[0, :2, 0] = 10, -10
    further = observations.copy()
    further[0, :2, 0] = 1000, -1000
    features = LinearFeatureBaseline().features
    np.testing.assert_array_equal(features(observations), features(further))


def test_regularization_shrinks_the_fit():
    observations, targets, mask = np.ones((1, 1, 4, 1)), np.full((1, 1, 4), 5.0), np.ones((1, 1, 4))
    weak, strong = (LinearFeatureBaseline(r).fit_predict(observations, targets, mask) for r in (1e-5, 1e3))
    assert abs(weak - 5).max() < 1e-3
    assert abs(strong).max() < 1


def test_a_fit_to_infinite_returns_is_refused():
    targets = np.zeros((3, 1, 4))
    targets[2] = np.inf
    for baseline in (LinearTimeBaseline(), ValueNetworkBaseline()):
        with pytest.raises(BaselineError, match="task 2: returns are not finite"):
            baseline.fit_predict(np.ones((3, 1, 4, 1)), targets, np.ones((3, 1, 4)))


def test_coefficients_that_stay_infinite_are_an_error_not_a_prediction(monkeypatch):
    attempts = []

    def never_finite(a, b, rcond):
        attempts.append(a[0, 0])
        return (np.full_like(b, np.nan),)

    monkeypatch.setattr(np.linalg, "lstsq", never_finite)
    with pytest.raises(BaselineError, match=r"baseline\.regularization"):
        fit(np.zeros((3, 2)), np.zeros(3), 1e-5)
    np.testing.assert_allclose(attempts, 1e-5 * 10.0 ** np.arange(5))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LinearFeatureBaseline(1e-5)),
        ("linear_time", LinearTimeBaseline(1e-5)),
        ({"name": "linear_feature", "regularization": 0.5}, LinearFeatureBaseline(0.5)),
        ("zero", ZeroBaseline()),
        ("value_network", ValueNetworkBaseline()),
        (
            {
                "name": "value_network",
                "hidden_sizes": [1],
                "num_epochs": 1,
                "learning_rate": 0.1,
                "steps_per_minibatch": 1,
                "shared": True,
            },
            ValueNetworkBaseline((1,), 1, 0.1, 1, True),
        ),
    ],
)
def test_a_configuration_builds_the_baseline_it_names(settings, expected):
    assert TypeAdapter(BaselineField).validate_python(settings).build() == expected


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("zero", "regularization", 0.1),
        ("value_network", "regularization", 0.1),
        ("linear_feature", "hidden_sizes", (8,)),
        ("linear_time", "shared", True),
        ("zero", "learning_rate", 0.1),
    ],
)
def test_an_option_of_another_baseline_is_refused(name, option, value):
    with pytest.raises(ValidationError, match=f"{option} is .* but the baseline {name} has no such option"):
        BaselineConfig.model_validate({"name": name, option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden_sizes", [0]),
        ("num_epochs", 0),
        ("learning_rate", 0),
        ("steps_per_minibatch", 0),
    ],
)
def test_impossible_value_networks_are_refused(option, value):
    with pytest.raises(ValidationError, match=option):
        BaselineConfig.model_validate({"name": "value_network", option: value})


@pytest.mark.parametrize("kind", BASELINES)
def test_fitted_parameters_are_the_originals_coefficients_by_feature(task, kind):
    arrays, observations, returns, mask = task
    fitted = BASELINES[kind].fit(observations[None], returns[None], mask[None])
    names = ["observation", "observation_squared", "time", "constant"][-len(fitted) :]
    assert list(fitted) == names
    np.testing.assert_allclose(
        np.concatenate([fitted[name][0] for name in names]), arrays[f"{kind}_coeffs"], rtol=1e-8, atol=1e-8
    )
