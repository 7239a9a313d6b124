"""The loss of RL2 on whole trials, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.losses import clipped_surrogate
from metaloom.pipeline.nn.distributions import Distribution


@dataclass(frozen=True)
class Sequences:
    """Trials [L, N] that a gradient step learns from, time first as recurrent networks take them.

    Attributes:
        inputs: [L, N, in].
        real: [n], the places of real steps among L·N; None where all are.
        actions: [n, A] or [n] of real steps, as all that follows.
        old_log_prob: [n], under the policy that acted.
        advantages: [n].
        targets: [n], of the values, in units of their own scale.
    """

    inputs: Tensor
    real: Tensor | None
    actions: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    targets: Tensor

    def rows(self, features: Tensor) -> Tensor:
        """Features [n, F] of real steps, of features [L, N, F]."""
        flat = features.flatten(0, 1)
        return flat if self.real is None else flat[self.real]


@dataclass(frozen=True)
class Weights:
    """Of the parts of the loss."""

    clip_eps: float
    value: float
    entropy: float


def sequence_loss(now: Distribution, values: Tensor, of: Sequences, weights: Weights) -> Tensor:
    """-mean min(r A, clip(r, 1 ± ε) A) + c_v ½ mean (v - R̂)² - c_e mean H, over the real steps of all trials.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9, where r = π(a|h) / π_old(a|h) and v are on what the network
    remembers, h, of the trial up to the step: the gradient runs back through all steps before.

    Args:
        now: distributions [n] under the policy that learns.
        values: v [n] that learn with it, in the units of their targets R̂.
        of: the trials.
        weights: c_v, c_e and ε.
    """
    loss = clipped_surrogate(now.log_prob(of.actions), of.old_log_prob, of.advantages, weights.clip_eps)
    loss = loss + weights.value * 0.5 * (values - of.targets).square().mean()
    return loss - weights.entropy * now.entropy().mean() if weights.entropy else loss


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip_eps: float) -> Tensor:
    """Fraction of the steps whose likelihood ratio is out of range."""
    return (((log_prob - old_log_prob).exp() - 1).abs() > clip_eps).to(torch.float64).mean()
