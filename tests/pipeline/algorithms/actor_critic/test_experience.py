"""Estimates of a critic: limits of GAE, ends of episodes, targets, scaling."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.actor_critic.learner import Moments, scaled
from metaloom.pipeline.algorithms.actor_critic.settings import A2C
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.experience import Experience

from .conftest import CATEGORICAL, GAUSSIAN, LENGTHS, POLICIES, learner_of


def critic(observations):
    return observations.sum(-1).astype(np.float32)


@pytest.fixture
def episodes(episodes_of):
    return episodes_of(GAUSSIAN)


def cut_value(episodes, b, e):
    """V of the state that a cut episode had reached; 0 where the task ended it."""
    return 0.0 if episodes.terminated[b, e] else float(critic(episodes.observations[b, e, episodes.lengths[b, e]]))


@pytest.mark.parametrize("target", ["td_lambda", "empirical"])
def test_with_lambda_one_advantages_are_returns_credited_with_the_value_at_the_cut_minus_values(episodes, target):
    estimate = Experience(episodes, slice(None)).estimate(critic, 0.9, 1.0, target)
    for b, e in zip(*np.nonzero(LENGTHS), strict=True):
        L = episodes.lengths[b, e]
        following = cut_value(episodes, b, e)
        for t in reversed(range(L)):
            following = episodes.rewards[b, e, t] + 0.9 * following
            value = critic(episodes.observations[b, e, t])
            assert estimate.advantages[b, e, t] == pytest.approx(following - value, rel=1e-5, abs=1e-5)
            assert estimate.targets[b, e, t] == pytest.approx(following, rel=1e-5, abs=1e-5)
        assert not estimate.advantages[b, e, L:].any()
        assert not estimate.values[b, e, L:].any()


def test_with_lambda_zero_advantages_are_the_errors_of_one_step(episodes):
    estimate = Experience(episodes, slice(None)).estimate(critic, 0.9, 0.0, "td_lambda")
    for b, e in zip(*np.nonzero(LENGTHS), strict=True):
        L = episodes.lengths[b, e]
        values = [float(critic(o)) for o in episodes.observations[b, e, :L]] + [cut_value(episodes, b, e)]
        expected = [episodes.rewards[b, e, t] + 0.9 * values[t + 1] - values[t] for t in range(L)]
        np.testing.assert_allclose(estimate.advantages[b, e, :L], expected, rtol=1e-5, atol=1e-5)


def test_targets_hold_advantages_before_they_are_scaled(episodes):
    estimate = Experience(episodes, slice(None)).estimate(critic, 0.9, 0.8, "td_lambda")
    np.testing.assert_allclose(estimate.targets, estimate.values + estimate.advantages)


@pytest.mark.parametrize("kernel", ["fused", "torch"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_rows_are_the_real_steps_with_the_log_probability_that_they_had(episodes_of, policy, kernel):
    episodes = episodes_of(policy)
    learner = learner_of(A2C(kernel=kernel), policy)
    experience = Experience(episodes, slice(1, 2))
    log_prob = learner.steps(learner.initialize(run_seed=0)).old_log_prob(experience)
    assert len(experience.observations) == len(log_prob) == 9
    assert np.array_equal(experience.observations[:2], episodes.observations[1, 0, :2])
    if policy is CATEGORICAL:
        assert log_prob[1] == episodes.behavior["log_probs"][1, 0, 1, episodes.actions[1, 0, 1]]
    else:
        z = episodes.actions[1, 0, 1] - episodes.behavior["mean"][1, 0, 1]
        std = np.exp(episodes.behavior["log_std"][1])
        expected = (-0.5 * (z / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum()
        assert log_prob[1] == pytest.approx(expected, rel=1e-5)


def test_running_moments_are_those_of_all_numbers_so_far():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, size=n) for n in (1, 5, 40)]
    moments = Moments()
    for part in parts:
        moments = moments.merged(part)
    everything = np.concatenate(parts)
    assert moments.mean == pytest.approx(everything.mean())
    assert moments.std == pytest.approx(everything.std())


def test_scaling_by_running_moments_uses_them_and_leaves_padding_alone():
    mask = np.array([[[1.0, 1.0, 0.0]]])
    found = scaled(np.array([[[4.0, 8.0, 0.0]]]), mask, ProcessingConfig(), Moments(10, 2.0, 40.0))
    np.testing.assert_allclose(found, [[[1.0, 3.0, 0.0]]], rtol=1e-6)
    positive = ProcessingConfig(positive_advantages=True)
    found = scaled(np.array([[[4.0, 8.0, 0.0]]]), mask, positive, Moments(10, 2.0, 40.0))
    np.testing.assert_allclose(found, [[[1e-8, 2.0, 0.0]]], rtol=1e-6)
    # Of numbers that were all 2 so far, the deviation is 0.
    np.testing.assert_allclose(scaled(np.full((1, 1, 3), 3.0), mask, ProcessingConfig(), Moments(10, 2.0))[..., 0], 1e8)


def test_scaling_by_a_batch_is_task_by_task():
    mask = np.ones((2, 1, 4))
    found = scaled(np.random.default_rng(0).normal(size=(2, 1, 4)) * [[[1.0]], [[9.0]]], mask, ProcessingConfig(), None)
    np.testing.assert_allclose(found.mean(axis=(1, 2)), 0, atol=1e-9)
    np.testing.assert_allclose(found.std(axis=(1, 2)), 1, rtol=1e-6)
