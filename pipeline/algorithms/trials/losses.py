"""The losses of whole trials, in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.losses import policy_loss
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Sequences:
    """Trials [L, N] that a gradient step learns from, time first as recurrent networks take them.

    Attributes:
        inputs: [L, N, in], what the policy sees and, behind it, the position that the critic alone sees.
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


class TrialPolicy(Protocol):
    """A policy that adapts within a trial, and its values, as functions of explicit parameters."""

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the policy's parameters that PPO changes, in order."""
        ...

    def inputs(self, trials: Trials) -> Array:
        """Return what the policy sees at every step of trials, [N, L, in] float32."""
        ...

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the distributions that acted from what was recorded of them, [...] each."""
        ...

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        """Return distributions [n] of actions at real steps, and values [n] in units of their own scale."""
        ...

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return values [L, N] of inputs [L, N, in], in units of their own scale."""
        ...


@dataclass(frozen=True)
class Weights:
    """Of the parts of the loss."""

    clip_eps: float | None
    value: float
    entropy: float


def sequence_loss(now: Distribution, values: Tensor, of: Sequences, weights: Weights) -> Tensor:
    """-mean min(r A, clip(r, 1 ± ε) A) + c_v ½ mean (v - R̂)² - c_e mean H, over the real steps of all trials.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9, where r = π(a|h) / π_old(a|h) and v are on what is known, h, of
    the trial up to the step. Where h is the state of a network that learns with them, the gradient runs back through
    all steps before. Where nothing is clipped, the policy gradient's -mean A log π(a|h) takes the first mean's place.

    Args:
        now: distributions [n] under the policy that learns.
        values: v [n] that learn with it, in the units of their targets R̂.
        of: the trials.
        weights: c_v, c_e and ε.
    """
    loss = policy_loss(now.log_prob(of.actions), of.old_log_prob, of.advantages, weights.clip_eps)
    loss = loss + weights.value * 0.5 * (values - of.targets).square().mean()
    return loss - weights.entropy * now.entropy().mean() if weights.entropy else loss


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip_eps: float) -> Tensor:
    """Fraction of the steps whose likelihood ratio is out of range."""
    return (((log_prob - old_log_prob).exp() - 1).abs() > clip_eps).to(torch.float64).mean()
