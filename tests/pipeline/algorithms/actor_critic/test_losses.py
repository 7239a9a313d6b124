"""Losses of actor-critics and their written-down derivatives, against hand-derived numbers and autograd in float64."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.actor_critic.a2c import A2C
from metaloom.pipeline.algorithms.actor_critic.ppo import PPO
from metaloom.pipeline.algorithms.actor_critic.ppo2 import PPO2
from metaloom.pipeline.algorithms.actor_critic.heads import CategoricalHead, GaussianHead

RNG = np.random.default_rng(3)
N = 6


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_a2c_follows_the_log_probability_times_the_advantage():
    loss, slopes = A2C().policy_loss(np.array([-1.0, -2.0]), np.array([9.0, 9.0]), np.array([3.0, -1.0]))
    assert loss == pytest.approx(-(3 * -1.0 + -1 * -2.0) / 2)
    np.testing.assert_allclose(slopes, [-1.5, 0.5])


def test_the_clipped_surrogate_by_hand():
    # Ratios 1.5 and 0.5 with clipping at 1 ± 0.2; good actions gain at most 1.2, bad ones lose at least 0.8.
    old = np.zeros(4)
    log_prob = np.log([1.5, 0.5, 1.5, 0.5])
    advantages = np.array([2.0, 2.0, -1.0, -1.0])
    loss, slopes = PPO(clip_eps=0.2).policy_loss(log_prob, old, advantages)
    assert loss == pytest.approx(-(1.2 * 2 + 0.5 * 2 - 1.5 - 0.8) / 4)
    np.testing.assert_allclose(slopes, [0, -0.5 * 2 / 4, 1.5 / 4, 0])


def test_the_clipped_value_loss_by_hand():
    # v_old = 1, ε = 0.5. Row 0: v = 2 is clipped to 1.5, target 0: the larger error is 2, which counts.
    # Row 1: v = 2, target 3: clipped error -1.5 is larger than -1, so the value gets no slope. Row 2: within the range.
    loss, slopes = PPO2(clip_eps=0.5).value_loss(np.array([2.0, 2.0, 1.2]), np.ones(3), np.array([0.0, 3.0, 1.0]))
    assert loss == pytest.approx(0.5 * (4 + 2.25 + 0.04) / 3)
    np.testing.assert_allclose(slopes, [2 / 3, 0, 0.2 / 3])


def test_ppo_that_clips_nothing_has_the_policy_gradient_in_its_first_epoch():
    log_prob, advantages = numbers(N), numbers(N)
    _, slopes = PPO(clip_eps=1e9).policy_loss(log_prob, log_prob, advantages)
    np.testing.assert_allclose(slopes, A2C().policy_loss(log_prob, log_prob, advantages)[1], rtol=1e-6)


@pytest.mark.parametrize("learn_std", [True, False])
def test_the_gaussian_head_has_the_derivatives_that_autograd_finds(learn_std):
    mean, actions, weights, log_std = numbers(N, 2), numbers(N, 2), numbers(N), np.array([-0.3, -9.0], np.float32)
    gradient = np.zeros(2, np.float32)
    head = GaussianHead(log_std, gradient, min_std=np.exp(-1.0), learn_std=learn_std)
    log_prob = head.log_prob(mean, actions)
    slopes = head.backward(weights, 0.3)
    m, s = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (mean, log_std))
    reference = torch.distributions.Normal(m, s.clamp(min=-1.0).exp())
    expected = reference.log_prob(torch.tensor(actions, dtype=torch.float64)).sum(-1)
    np.testing.assert_allclose(log_prob, expected.detach(), rtol=1e-4)
    loss = (torch.tensor(weights) * expected).sum() - 0.3 * reference.entropy().sum(-1).mean()
    expected_mean, expected_std = torch.autograd.grad(loss, (m, s))
    np.testing.assert_allclose(slopes, expected_mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, expected_std if learn_std else [0, 0], rtol=1e-4, atol=1e-5)
    assert head.entropy(mean) == pytest.approx(reference.entropy().sum(-1).mean().item(), rel=1e-6)
    assert gradient[1] == 0  # below its floor


def test_the_categorical_head_has_the_derivatives_that_autograd_finds():
    logits, weights, actions = numbers(N, 4), numbers(N), RNG.integers(4, size=N)
    head = CategoricalHead()
    log_prob = head.log_prob(logits, actions)
    slopes = head.backward(weights, 0.3)
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    reference = torch.distributions.Categorical(logits=x)
    expected = reference.log_prob(torch.tensor(actions))
    np.testing.assert_allclose(log_prob, expected.detach(), rtol=1e-4, atol=1e-6)
    loss = (torch.tensor(weights) * expected).sum() - 0.3 * reference.entropy().mean()
    np.testing.assert_allclose(slopes, torch.autograd.grad(loss, x)[0], rtol=1e-4, atol=1e-6)
    assert head.entropy(logits) == pytest.approx(reference.entropy().mean().item(), rel=1e-5)


def test_the_kl_of_both_heads_is_that_of_torch():
    old, new, log_std, old_std = numbers(N, 3), numbers(N, 3), numbers(3), numbers(N, 3)
    head = GaussianHead(log_std, np.zeros_like(log_std), min_std=1e-6, learn_std=True)
    normal = torch.distributions.Normal
    std, std_old = torch.tensor(np.exp(log_std)), torch.tensor(np.exp(old_std))
    expected = torch.distributions.kl_divergence(normal(torch.tensor(old), std_old), normal(torch.tensor(new), std))
    assert head.kl({"mean": old, "log_std": old_std}, new) == pytest.approx(expected.sum(-1).mean().item(), rel=1e-4)
    p, q = (torch.distributions.Categorical(logits=torch.tensor(x)) for x in (old, new))
    found = CategoricalHead().kl({"log_probs": p.logits.numpy()}, new)
    assert found == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item(), rel=1e-4)
