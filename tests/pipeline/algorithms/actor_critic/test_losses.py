"""Losses of actor-critics against numbers derived by hand, in torch and, with their derivatives, in the kernel."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.actor_critic import gradient_steps
from metaloom.pipeline.kernels import actor_critic as kernel
from metaloom.pipeline.nn.distributions import Categorical, DiagGaussian

RNG = np.random.default_rng(3)
N = 6


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def loss_and_slopes(loss, x, *others):
    """A loss of the definition and its derivatives with respect to its first argument."""
    x = torch.tensor(x, requires_grad=True)
    value = loss(x, *(torch.tensor(other) if isinstance(other, np.ndarray) else other for other in others))
    return value.item(), torch.autograd.grad(value, x)[0].numpy()


@pytest.fixture(params=["torch", "fused"])
def policy_loss(request):
    if request.param == "torch":
        return lambda *arguments: loss_and_slopes(gradient_steps.policy_loss, *arguments)
    return lambda *arguments: (kernel.policy_loss(*arguments), kernel.policy_slopes(*arguments))


@pytest.fixture(params=["torch", "fused"])
def value_slopes(request):
    if request.param == "torch":
        return lambda *arguments: loss_and_slopes(gradient_steps.value_loss, *arguments)[1]
    return kernel.value_slopes


def test_a2c_follows_the_log_probability_times_the_advantage(policy_loss):
    loss, slopes = policy_loss(np.array([-1.0, -2.0]), np.array([9.0, 9.0]), np.array([3.0, -1.0]), None)
    assert loss == pytest.approx(-(3 * -1.0 + -1 * -2.0) / 2)
    np.testing.assert_allclose(slopes, [-1.5, 0.5])


def test_the_clipped_surrogate_by_hand(policy_loss):
    # Ratios 1.5 and 0.5 with clipping at 1 ± 0.2; good actions gain at most 1.2, bad ones lose at least 0.8.
    old = np.zeros(4)
    log_prob = np.log([1.5, 0.5, 1.5, 0.5])
    advantages = np.array([2.0, 2.0, -1.0, -1.0])
    loss, slopes = policy_loss(log_prob, old, advantages, 0.2)
    assert loss == pytest.approx(-(1.2 * 2 + 0.5 * 2 - 1.5 - 0.8) / 4)
    np.testing.assert_allclose(slopes, [0, -0.5 * 2 / 4, 1.5 / 4, 0])


def test_the_clipped_value_loss_by_hand(value_slopes):
    # v_old = 1, ε = 0.5. Row 0: v = 2 is clipped to 1.5, target 0: the larger error is 2, which counts.
    # Row 1: v = 2, target 3: clipped error -1.5 is larger than -1, so the value gets no slope. Row 2: within the range.
    case = np.array([2.0, 2.0, 1.2]), np.ones(3), np.array([0.0, 3.0, 1.0])
    assert gradient_steps.value_loss(*map(torch.tensor, case), 0.5).item() == pytest.approx(0.5 * (4 + 2.25 + 0.04) / 3)
    np.testing.assert_allclose(value_slopes(*case, 0.5), [2 / 3, 0, 0.2 / 3])
    np.testing.assert_allclose(value_slopes(*case, None), [2 / 3, -1 / 3, 0.2 / 3])


def test_rounding_takes_no_slope_from_a_value_within_the_clipping_range(value_slopes):
    # V_old + (V - V_old) is V up to an ulp; where that made the clipped error larger, the slope was lost: 20% of the
    # gradient of values around 0.05.
    values, old_values, targets = 0.05 * numbers(1000), 0.05 * numbers(1000), 0.05 * numbers(1000)
    plain, rounded = values - targets, old_values + (values - old_values) - targets
    assert (np.square(rounded) > np.square(plain)).mean() > 0.05
    np.testing.assert_allclose(value_slopes(values, old_values, targets, 1.0), plain / 1000, rtol=1e-6)


def test_ppo_that_clips_nothing_has_the_policy_gradient_in_its_first_epoch(policy_loss):
    log_prob, advantages = numbers(N), numbers(N)
    slopes = [policy_loss(log_prob, log_prob, advantages, clip_eps)[1] for clip_eps in (1e9, None)]
    np.testing.assert_allclose(*slopes, rtol=1e-6)


def test_distributions_are_those_of_torch():
    old, new, log_std, old_std = numbers(N, 3), numbers(N, 3), numbers(3), numbers(N, 3)
    normal, (m, s, old_m, old_s) = torch.distributions.Normal, map(torch.tensor, (new, log_std, old, old_std))
    ours, theirs, before = DiagGaussian(m, s), normal(m, s.exp()), normal(old_m, old_s.exp())
    actions = torch.tensor(numbers(N, 3))
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1)[0])
    expected = torch.distributions.kl_divergence(before, theirs).sum(-1)
    torch.testing.assert_close(DiagGaussian(old_m, old_s).kl(ours), expected)
    ours, before = Categorical.of_logits(m), Categorical.of_logits(old_m)
    theirs, choices = torch.distributions.Categorical(logits=m), torch.tensor(RNG.integers(3, size=N))
    torch.testing.assert_close(ours.log_prob(choices), theirs.log_prob(choices))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    expected = torch.distributions.kl_divergence(torch.distributions.Categorical(logits=old_m), theirs)
    torch.testing.assert_close(before.kl(ours), expected)
