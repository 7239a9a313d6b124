"""Estimators of returns and advantages, in float64 along the last axis.

Padding must be zero in all inputs and is zero in all results.
"""

from typing import Literal

import numpy as np

from metaloom.pipeline.types import Array

EPSILON = 1e-8

Scale = Literal["std", "variance"]  # divisor used in normalization


def discounted_returns(rewards: Array, discount: float) -> Array:
    """Return discounted returns R_t = Σ_{k ≥ t} γ^{k-t} r_k, [..., T] float64."""
    returns = np.moveaxis(np.array(rewards, np.float64), -1, 0).copy()
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += discount * returns[t + 1]
    return np.moveaxis(returns, 0, -1)


def gae(rewards: Array, values: Array, next_values: Array, discount: float, gae_lambda: float) -> Array:
    """Return generalized advantage estimates, [..., T] float64. Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    Args:
        rewards: Rewards, [..., T].
        values: Values of the states before the steps, [..., T].
        next_values: Values of the states after the steps, [..., T]; at an episode's last step, the value to
            bootstrap from, which is 0 if the episode terminated.
        discount: Discount γ.
        gae_lambda: Weight λ; 1 gives returns minus values, 0 gives one-step TD errors.
    """
    return discounted_returns(rewards + discount * next_values - values, discount * gae_lambda)


def discounted_rewards(rewards: Array, discount: float) -> Array:
    """Return discounted rewards γ^t r_t, with t counted from the start of the episode, [..., T] float64."""
    return rewards * discount ** np.arange(rewards.shape[-1], dtype=np.float64)


def normalize(values: Array, mask: Array, scale: Scale = "std") -> Array:
    """Return values normalized over all real entries, (x - mean) / (std + 1e-8), and zero in the padding.

    The scale "variance" divides by the unbiased variance + 1e-8 instead, as garage does.
    """
    real = np.asarray(values, np.float64)[mask != 0]
    mean, std = real.mean(), real.std()
    if scale == "variance":
        count = np.count_nonzero(mask)
        std = std**2 * count / max(count - 1, 1)
    return (values - mean) / (std + EPSILON) * mask


def shift_positive(values: Array, mask: Array) -> Array:
    """Return the values shifted so that the smallest real entry is 1e-8; zero in the padding."""
    smallest = np.min(values, where=mask != 0, initial=np.inf)
    return (values - smallest + EPSILON) * mask
