"""Action distributions as functions of tensors, in any floating dtype and with any leading axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
KL_EPSILON = 1e-8
"""Added to 2σ² in the KL denominator, as in the original ProMP code."""


class DiagGaussian(NamedTuple):
    """Independent Gaussians over the action dimensions.

    Attributes:
        mean: μ [..., A].
        log_std: log σ, broadcastable to the mean's shape.
    """

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-density of actions [..., A], joint over the action dimensions: [...]."""
        z = (actions - self.mean) * (-self.log_std).exp()
        normalizer = self.log_std.sum(-1) + 0.5 * LOG_2PI * actions.shape[-1]
        return -0.5 * z.square().sum(-1) - normalizer

    def kl(self, other: DiagGaussian) -> Tensor:
        """KL(self ‖ other), summed over the action dimensions: [...].

        Zero up to rounding for equal distributions, possibly a tiny negative number.
        """
        std, other_std = self.log_std.exp(), other.log_std.exp()
        squares = (self.mean - other.mean).square() + (std.square() - other_std.square())
        per_dimension = squares / (2 * other_std.square() + KL_EPSILON) + (other.log_std - self.log_std)
        return per_dimension.sum(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, summed over the action dimensions; its leading axes are those of log_std."""
        return (self.log_std + 0.5 * (LOG_2PI + 1)).sum(-1)


def likelihood_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """p_new(a) / p_old(a) from the joint log-densities."""
    return (log_prob - old_log_prob).exp()
