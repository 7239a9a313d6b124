"""Action distributions over tensors of any floating-point dtype with any leading axes."""

import math
from functools import singledispatch
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
KL_EPSILON = 1e-8  # constant added to 2σ² in the denominator of the KL divergence, as in the original ProMP code

Self = TypeVar("Self", bound="Distribution")


class Distribution(Protocol):
    """Batch of action distributions with the leading shape [...]."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the joint log-density or log-probability of each action, [...]."""
        ...

    def kl(self: Self, other: Self) -> Tensor:
        """Return KL(self ‖ other), [...]."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy in nats, broadcastable to [...]."""
        ...

    def detach(self: Self) -> Self:
        """Return these distributions detached from the autograd graph."""
        ...


class DiagGaussian(NamedTuple):
    """Gaussian distributions with means μ [..., A] and independent dimensions; log σ is broadcastable to the means."""

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        z = (actions - self.mean) * (-self.log_std).exp()
        normalizer = self.log_std.sum(-1) + 0.5 * LOG_2PI * actions.shape[-1]
        return -0.5 * z.square().sum(-1) - normalizer

    def kl(self, other: "DiagGaussian") -> Tensor:
        """Return KL(self ‖ other), [...]. For nearly equal distributions, it may be slightly negative."""
        std, other_std = self.log_std.exp(), other.log_std.exp()
        squares = (self.mean - other.mean).square() + (std.square() - other_std.square())
        per_dimension = squares / (2 * other_std.square() + KL_EPSILON) + (other.log_std - self.log_std)
        return per_dimension.sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, summed over the action dimensions; it has the leading axes of `log_std`."""
        return (self.log_std + 0.5 * (LOG_2PI + 1)).sum(-1)

    def detach(self) -> "DiagGaussian":
        return DiagGaussian(self.mean.detach(), self.log_std.detach())


class Categorical(NamedTuple):
    """Categorical distributions over n discrete actions, given by normalized log-probabilities [..., n]."""

    log_probs: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor) -> "Categorical":
        """Build distributions from logits [..., n]."""
        return cls(torch.log_softmax(logits, -1))

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def kl(self, other: "Categorical") -> Tensor:
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def detach(self) -> "Categorical":
        return Categorical(self.log_probs.detach())


def likelihood_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return p_new(a) / p_old(a) from the joint log-densities."""
    return (log_prob - old_log_prob).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_eps: float) -> Tensor:
    """Return PPO's clipped surrogate objective min(r A, clip(r, 1 ± ε) A) for each action.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7, without taking the mean.
    """
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return (ratio * advantages).minimum(clipped * advantages)


@singledispatch
def kl_from_itself(distribution: Distribution) -> Tensor:
    """Return KL(p ‖ q), [...], where q are the distributions and p is a detached copy of them.

    Its value and gradient are 0, and its Hessian is the Fisher information matrix.
    """
    return distribution.detach().kl(distribution)


@kl_from_itself.register
def _(distribution: DiagGaussian) -> Tensor:
    # Omit the ε of DiagGaussian.kl, which would matter if σ² is small.
    mean, log_std = distribution
    squares = (mean - mean.detach()).square() * (-2 * log_std).exp()
    log_ratios = log_std.detach() - log_std
    return (0.5 * (squares + (2 * log_ratios).expm1()) - log_ratios).sum(-1)
