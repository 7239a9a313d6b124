import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.baselines import BaselineError
from metaloom.pipeline.baselines.linear import LinearFeatureBaseline, LinearTimeBaseline, ZeroBaseline
from metaloom.pipeline.baselines.value_network import ValueNetworkBaseline
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.processing import process_samples, task_advantages
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.stages.process_samples import process_samples as samples_of

GOLDEN = Path(__file__).parents[1] / "golden"
BASELINES = {"feature": LinearFeatureBaseline(), "time": LinearTimeBaseline(), "zero": ZeroBaseline()}
PLAIN = ProcessingConfig(discount=0.9, normalize_advantages=False)
NORMALIZED = ProcessingConfig(discount=0.9)


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def padded(rows, lengths):
    result = np.zeros((len(lengths), max(lengths), *rows.shape[1:]))
    for e, episode in enumerate(np.split(rows, np.cumsum(lengths)[:-1])):
        result[e, : len(episode)] = episode
    return result


def golden_task(arrays, task):
    """Observations, rewards and mask of a golden task as [E, T, ...] float64."""
    lengths = arrays[f"task{task}_lengths"]
    mask = (np.arange(max(lengths)) < lengths[:, None]).astype(np.float32)
    observations = padded(arrays[f"task{task}_observations"], lengths)
    return observations, padded(arrays[f"task{task}_rewards"], lengths), mask


def golden_advantages(arrays, task, baseline, **settings):
    observations, rewards, mask = golden_task(arrays, task)
    processing = ProcessingConfig(discount=float(arrays["discount"]), **settings)
    returns = discounted_returns(rewards, processing.discount)
    (values,) = baseline.fit_predict(observations[None], returns[None], mask[None])
    return task_advantages(rewards, values, mask, processing)[mask == 1]


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("name", ["sample_processor", "meta_sample_processor"])
def test_returns_agree_with_the_original_to_1e_8(name, task):
    arrays = load(name)
    _, rewards, mask = golden_task(arrays, task)
    returns = discounted_returns(rewards, float(arrays["discount"]))[mask == 1]
    expected = next(v for k, v in arrays.items() if k.endswith(f"task{task}_returns"))
    np.testing.assert_allclose(returns, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
@pytest.mark.parametrize("kind", BASELINES)
def test_advantages_agree_with_the_original_to_1e_8(kind, gae_lambda, normalized, positive, task):
    arrays = load("sample_processor")
    found = golden_advantages(
        arrays,
        task,
        BASELINES[kind],
        gae_lambda=gae_lambda,
        normalize_advantages=normalized,
        positive_advantages=positive,
    )
    key = f"{kind}_lam{gae_lambda}_norm{normalized:d}_pos{positive:d}_task{task}_advantages"
    np.testing.assert_allclose(found, arrays[key], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
def test_advantages_of_a_meta_batch_agree_with_the_original_to_1e_8(gae_lambda, task):
    arrays = load("meta_sample_processor")
    found = golden_advantages(
        arrays,
        task,
        LinearFeatureBaseline(),
        gae_lambda=gae_lambda,
        normalize_advantages=True,
        positive_advantages=False,
    )
    np.testing.assert_allclose(found, arrays[f"lam{gae_lambda}_task{task}_advantages"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
def test_the_stage_gives_the_original_numbers_in_float32(batch, gae_lambda):
    arrays = load("meta_sample_processor")
    tasks = [golden_task(arrays, task) for task in range(3)]
    T = max(rewards.shape[1] for _, rewards, _ in tasks)
    observations = np.stack([np.pad(o, [(0, 0), (0, T + 1 - o.shape[1]), (0, 0)]) for o, _, _ in tasks])
    rewards = np.stack([np.pad(r, [(0, 0), (0, T - r.shape[1])]) for _, r, _ in tasks])
    lengths = np.stack([arrays[f"task{task}_lengths"] for task in range(3)])
    samples = process_samples(
        batch(observations, rewards, lengths),
        LinearFeatureBaseline(),
        ProcessingConfig(discount=float(arrays["discount"]), gae_lambda=gae_lambda),
    )
    for task in range(3):
        real = samples.mask[task] == 1
        expected = arrays[f"lam{gae_lambda}_task{task}_advantages"]
        np.testing.assert_allclose(samples.advantages[task][real], expected, atol=1e-4)


@pytest.fixture
def ragged(batch):
    """Two tasks whose padding holds what must not matter."""
    rng = np.random.default_rng(0)
    episodes = batch(rng.standard_normal((2, 3, 7, 2)), rng.standard_normal((2, 3, 6)), [[3, 5, 6], [1, 6, 2]])
    for value in (episodes.observations, episodes.rewards):
        value.flags.writeable = False
    return episodes


def test_without_a_baseline_advantages_are_returns(ragged):
    samples = process_samples(ragged, ZeroBaseline(), PLAIN)
    np.testing.assert_array_equal(samples.advantages, samples.returns)
    assert not samples.values.any()


def test_rewards_and_observations_on_padding_do_not_matter(batch, ragged):
    other = batch(
        np.where(np.pad(ragged.mask, [(0, 0), (0, 0), (0, 1)])[..., None] == 1, ragged.observations, 9),
        np.where(ragged.mask == 1, ragged.rewards, 9),
        ragged.lengths,
    )
    found, expected = (process_samples(e, LinearFeatureBaseline(), PLAIN) for e in (other, ragged))
    for name in ("returns", "values", "advantages"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert not getattr(found, name)[ragged.mask == 0].any()


def test_normalized_advantages_have_unit_std_per_task_over_real_steps(ragged):
    samples = process_samples(ragged, ZeroBaseline(), NORMALIZED)
    for b in range(2):
        real = samples.advantages[b][samples.mask[b] == 1]
        assert abs(real.mean()) < 1e-6
        assert abs(real.std() - 1) < 1e-4


def test_positive_advantages_are_positive_on_real_steps(ragged):
    samples = process_samples(ragged, ZeroBaseline(), PLAIN.model_copy(update={"positive_advantages": True}))
    assert (samples.advantages[samples.mask == 1] > 0).all()
    assert not samples.advantages[samples.mask == 0].any()


@pytest.mark.parametrize(("setting", "value"), [("discount", 0.5), ("gae_lambda", 0.3)])
def test_discount_and_lambda_change_the_advantages(ragged, setting, value):
    plain = process_samples(ragged, LinearFeatureBaseline(), PLAIN)
    changed = process_samples(ragged, LinearFeatureBaseline(), PLAIN.model_copy(update={setting: value}))
    assert abs(plain.advantages - changed.advantages).max() > 0.1


def test_dividing_by_the_variance_undoes_the_unit_std(ragged):
    samples = process_samples(ragged, ZeroBaseline(), NORMALIZED.model_copy(update={"adv_norm": "variance"}))
    plain = process_samples(ragged, ZeroBaseline(), PLAIN)
    for b in range(2):
        real = samples.mask[b] == 1
        values = plain.advantages[b][real].astype(np.float64)
        expected = (values - values.mean()) / values.var(ddof=1)
        np.testing.assert_allclose(samples.advantages[b][real], expected, rtol=1e-5, atol=1e-6)


def test_every_batch_of_every_run_has_a_seed_of_its_own():
    seeds = []

    def process(start, episodes, *, seed, parallel):
        seeds.append((start, seed))

    learner = SimpleNamespace(at_start=lambda learner, *, run_seed: (learner, run_seed), process=process)
    places = [*itertools.product((1, 2), range(3), range(2))]
    for place in places:
        samples_of(learner, At(*place), map, state=SimpleNamespace(learner="learner"), episodes=None)
    assert [start for start, _ in seeds] == [("learner", run_seed) for run_seed, _, _ in places]
    assert len({seed for _, seed in seeds}) == len(places)


def test_the_seed_reaches_the_baseline(ragged):
    baseline = ValueNetworkBaseline(num_epochs=1)
    first, again, other = (process_samples(ragged, baseline, PLAIN, seed=seed).values for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-4


def test_a_task_does_not_depend_on_threads_or_on_other_tasks(batch, ragged):
    expected = process_samples(ragged, LinearFeatureBaseline(), NORMALIZED)
    with ThreadPoolExecutor(2) as pool:
        threaded = process_samples(ragged, LinearFeatureBaseline(), NORMALIZED, parallel=pool.map)
    alone = process_samples(
        batch(ragged.observations[1:], ragged.rewards[1:], ragged.lengths[1:]), LinearFeatureBaseline(), NORMALIZED
    )
    np.testing.assert_array_equal(threaded.advantages, expected.advantages)
    np.testing.assert_array_equal(alone.advantages, expected.advantages[1:])


def test_a_reward_that_is_not_finite_is_refused_by_the_number_of_its_task(batch, ragged):
    rewards = ragged.rewards.copy()
    rewards[1, 0, 0] = np.nan
    with pytest.raises(BaselineError, match="task 1: returns are not finite"):
        process_samples(batch(ragged.observations, rewards, ragged.lengths), LinearFeatureBaseline(), PLAIN)
