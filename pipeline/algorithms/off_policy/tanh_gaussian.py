"""Actions tanh(u) with u from a Gaussian that a network describes, as autograd differentiates them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import softplus

from metaloom.pipeline.policies.actors.tanh_gaussian import MAX_LOG_STD, MIN_LOG_STD


class TanhGaussianSample(NamedTuple):
    """Actions [n, A] in (-1, 1) with their joint log-densities [n], and mean, log_std and u [n, A] before the tanh."""

    actions: Tensor
    log_prob: Tensor
    mean: Tensor
    log_std: Tensor
    u: Tensor


def sample(outputs: Tensor, noise: Tensor) -> TanhGaussianSample:
    """Draw a = tanh(u), u = μ + σ ε; log π(a) = log N(u; μ, σ) - Σ log(1 - tanh² u).

    Haarnoja et al. 2018, arXiv:1801.01290, eq. 20 and 21.

    Args:
        outputs: [n, 2A], means and then log standard deviations, which are clamped.
        noise: [n, A], ε, standard normal.
    """
    mean, raw = outputs.chunk(2, -1)
    log_std = raw.clamp(MIN_LOG_STD, MAX_LOG_STD)
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - log_slope(u)
    return TanhGaussianSample(u.tanh(), log_prob.sum(-1), mean, log_std, u)


def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh² u), by which densities of u and of tanh(u) differ."""
    # Differs from the paper's code: exactly, where log(1 - a² + 1e-6) is off for |u| > 6.
    return 2 * (math.log(2) - u - softplus(-2 * u, threshold=50))
