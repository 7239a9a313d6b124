"""Losses of the policies and critics of A2C, PPO and PPO2 on n steps, in torch: the definition of each."""

import torch
from torch import Tensor

from metaloom.pipeline.nn.distributions import likelihood_ratio


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_eps: float | None) -> Tensor:
    """Return the clipped surrogate, or the policy gradient's where nothing is clipped.

    Args:
        log_prob: [n] under the policy that learns.
        old_log_prob: [n] under the policy that acted.
        advantages: [n].
        clip_eps: ε, the clipping range of the likelihood ratio.
    """
    if clip_eps is None:
        return policy_gradient_loss(log_prob, advantages)
    return clipped_surrogate(log_prob, old_log_prob, advantages, clip_eps)


def policy_gradient_loss(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """-mean A log π(a|o). Mnih et al. 2016, arXiv:1602.01783, section 4: ∇ log π(a|s; θ') A(s, a)."""
    return -(advantages * log_prob).mean()


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_eps: float) -> Tensor:
    """-mean min(r A, clip(r, 1 ± ε) A). Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    ratio = likelihood_ratio(log_prob, old_log_prob)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip_eps: float | None) -> Tensor:
    """Return half the mean squared error of the critic, clipped where `clip_eps` says so.

    Args:
        values: [n] by the critic that learns.
        old_values: [n] by the critic before the update.
        targets: [n].
        clip_eps: ε, the range within which a value may change.
    """
    if clip_eps is None:
        return 0.5 * (values - targets).square().mean()
    return clipped_value_loss(values, old_values, targets, clip_eps)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip_eps: float) -> Tensor:
    """½ mean max((V - t)², (V_old + clip(V - V_old, ±ε) - t)²), after OpenAI Baselines' ppo2/model.py."""
    plain, change = values - targets, values.detach() - old_values
    # Where the clipped error counts, the value lies outside the range and moving it changes nothing. Within the range
    # exactly nothing is added here: rounding must not decide between two errors that are one number.
    clipped = plain.detach() + (change.clamp(-clip_eps, clip_eps) - change)
    return 0.5 * torch.where(plain.abs() >= clipped.abs(), plain, clipped).square().mean()
