"""Processing for DiCE: agreement with the original processor, and what its settings do."""

from pathlib import Path

import numpy as np
import pytest

from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.baselines.linear import LinearFeatureBaseline, LinearTimeBaseline, ZeroBaseline
from metaloom.pipeline.baselines.value_network import ValueNetworkBaseline
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.processing import process_samples, scale, task_advantages
from metaloom.pipeline.estimation.returns import discounted_returns, discounted_rewards

GOLDEN = Path(__file__).parents[1] / "golden" / "dice_sample_processor.npz"
BASELINES = {"feature": LinearFeatureBaseline(), "time": LinearTimeBaseline(), "zero": ZeroBaseline()}
PLAIN = ProcessingConfig(name="dice", discount=0.9, normalize_advantages=False)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def golden_settings(arrays, normalized, positive, **settings):
    norm = "padded" if normalized or positive else "real"
    return ProcessingConfig(
        name="dice",
        discount=float(arrays["discount"]),
        normalize_advantages=normalized,
        positive_advantages=positive,
        dice_norm=norm,
        **settings,
    )


def golden_fit(arrays, task, baseline, targets):
    """Predictions [E, T] for the targets of a golden task, as the stage would make them."""
    observations, mask = arrays[f"task{task}_padded_observations"], arrays[f"task{task}_padded_mask"]
    return baseline.fit_predict(observations[None], targets[None], mask[None])[0]


@pytest.mark.parametrize("task", [0, 1, 2])
def test_discounted_rewards_agree_with_the_original_to_1e_8(golden, task):
    mask = golden[f"task{task}_padded_mask"]
    found = discounted_rewards(golden[f"task{task}_padded_rewards"], float(golden["discount"]))
    expected = golden[f"task{task}_discounted_rewards"]
    np.testing.assert_allclose(found[mask == 1], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", BASELINES)
def test_adjusted_rewards_agree_with_the_original_to_1e_8_padding_included(golden, kind, normalized, positive, task):
    settings = golden_settings(golden, normalized, positive)
    rewards = discounted_rewards(golden[f"task{task}_padded_rewards"], settings.discount)
    predicted = golden_fit(golden, task, BASELINES[kind], rewards)
    found = scale(rewards - predicted, golden[f"task{task}_padded_mask"], settings)
    for variant in ("none_lam1.0", "feature_lam1.0", "feature_lam0.95"):
        expected = golden[f"{kind}_ret-{variant}_norm{normalized:d}_pos{positive:d}_task{task}_adjusted_rewards"]
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
def test_advantages_of_the_return_baseline_agree_with_the_original_to_1e_8(
    golden, gae_lambda, normalized, positive, task
):
    settings = golden_settings(golden, normalized, positive, gae_lambda=gae_lambda)
    rewards, mask = golden[f"task{task}_padded_rewards"], golden[f"task{task}_padded_mask"]
    values = golden_fit(golden, task, LinearFeatureBaseline(), discounted_returns(rewards, settings.discount))
    found = task_advantages(rewards, values, mask, settings)
    for kind in BASELINES:
        key = f"{kind}_ret-feature_lam{gae_lambda}_norm{normalized:d}_pos{positive:d}_task{task}_advantages"
        np.testing.assert_allclose(found, golden[key], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("normalized", "positive"), [(False, False), (True, False), (True, True)])
def test_the_stage_gives_the_original_numbers_in_float32_and_zeros_on_padding(golden, batch, normalized, positive):
    settings = golden_settings(golden, normalized, positive, return_baseline=BaselineConfig())
    samples = process_samples(batch(*golden_episodes(golden)), LinearTimeBaseline(), settings)
    np.testing.assert_array_equal(samples.mask, np.stack([golden[f"task{i}_padded_mask"] for i in range(3)]))
    for name in ("adjusted_rewards", "advantages"):
        keys = (f"time_ret-feature_lam1.0_norm{normalized:d}_pos{positive:d}_task{i}_{name}" for i in range(3))
        expected = np.stack([golden[key] for key in keys]) * samples.mask
        np.testing.assert_allclose(getattr(samples, name), expected, atol=1e-4)


def golden_episodes(arrays):
    observations, rewards, mask = (
        np.stack([arrays[f"task{task}_padded_{name}"] for task in range(3)])
        for name in ("observations", "rewards", "mask")
    )
    return np.pad(observations, [(0, 0), (0, 0), (0, 1), (0, 0)]), rewards, mask.sum(-1)


@pytest.fixture
def ragged(batch):
    rng = np.random.default_rng(0)
    return batch(rng.standard_normal((2, 4, 7, 2)), rng.standard_normal((2, 4, 6)), [[3, 5, 6, 2], [1, 6, 2, 4]])


def changed(**settings):
    return ProcessingConfig.model_validate(PLAIN.model_dump() | settings)


def test_without_baselines_the_adjusted_rewards_sum_to_the_discounted_return(ragged):
    samples = process_samples(ragged, ZeroBaseline(), PLAIN)
    np.testing.assert_allclose(samples.adjusted_rewards.sum(-1), samples.returns[..., 0], rtol=1e-5)
    np.testing.assert_array_equal(samples.advantages, samples.returns)
    assert not samples.values.any()


def test_processing_for_advantages_leaves_adjusted_rewards_out(ragged):
    samples = process_samples(ragged, ZeroBaseline(), changed(name="advantages"))
    assert samples.adjusted_rewards is None


def test_the_two_baselines_predict_rewards_and_returns(ragged):
    settings = changed(return_baseline="linear_feature")
    samples = process_samples(ragged, LinearTimeBaseline(), settings)
    plain = process_samples(ragged, LinearFeatureBaseline(), changed(name="advantages"))
    np.testing.assert_array_equal(samples.values, plain.values)
    np.testing.assert_array_equal(samples.advantages, plain.advantages)
    rewards = discounted_rewards(ragged.rewards * ragged.mask, 0.9)
    residual = rewards - LinearTimeBaseline().fit_predict(ragged.observations[:, :, :-1], rewards, ragged.mask)
    np.testing.assert_allclose(samples.adjusted_rewards, residual, atol=1e-6)


def test_normalized_adjusted_rewards_have_unit_std_per_task_over_real_steps(ragged):
    samples = process_samples(ragged, LinearTimeBaseline(), changed(normalize_advantages=True))
    for b in range(2):
        real = samples.adjusted_rewards[b][samples.mask[b] == 1]
        assert abs(real.mean()) < 1e-6
        assert abs(real.std() - 1) < 1e-4
    assert not samples.adjusted_rewards[samples.mask == 0].any()


def test_statistics_over_padding_have_unit_std_over_all_cells_before_it_is_masked(ragged):
    settings = changed(normalize_advantages=True, dice_norm="padded")
    rewards = discounted_rewards(ragged.rewards * ragged.mask, 0.9)
    adjusted = scale(rewards[0], ragged.mask[0], settings)
    assert adjusted.std() == pytest.approx(1, abs=1e-6)
    assert abs(adjusted[ragged.mask[0] == 0]).min() > 0
    samples = process_samples(ragged, ZeroBaseline(), settings)
    np.testing.assert_allclose(samples.adjusted_rewards[0], adjusted * ragged.mask[0], rtol=1e-6)
    assert not samples.advantages[samples.mask == 0].any()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"discount": 0.5}, "adjusted_rewards"),
        ({"normalize_advantages": True}, "adjusted_rewards"),
        ({"normalize_advantages": True, "adv_norm": "variance"}, "adjusted_rewards"),
        ({"normalize_advantages": True, "dice_norm": "padded"}, "adjusted_rewards"),
        ({"positive_advantages": True}, "adjusted_rewards"),
        ({"gae_lambda": 0.3}, "advantages"),
        ({"return_baseline": "linear_time"}, "advantages"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_every_setting_changes_the_samples(ragged, settings, field):
    # With all but the last of the settings on both sides, so that only the last one differs.
    base = dict(list(settings.items())[:-1])
    plain, other = (process_samples(ragged, ZeroBaseline(), changed(**s)) for s in (base, settings))
    assert abs(getattr(plain, field) - getattr(other, field)).max() > 1e-3


def test_a_seed_reaches_both_baselines(ragged):
    settings = changed(return_baseline={"name": "value_network", "num_epochs": 1})
    first, again, other = (
        process_samples(ragged, ValueNetworkBaseline(num_epochs=1), settings, seed=s) for s in (1, 1, 2)
    )
    for name in ("values", "adjusted_rewards"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert abs(getattr(first, name) - getattr(other, name)).max() > 1e-4
