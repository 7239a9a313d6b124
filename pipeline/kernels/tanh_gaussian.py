"""Actions tanh(u) with Gaussian u, and their reparameterized derivatives.

Haarnoja et al. 2018, arXiv:1801.01290, appendix C. Computes in the precision of the outputs.
"""

from __future__ import annotations

import math

import numpy as np

from metaloom.pipeline.policies.actors.off_policy import MAX_LOG_STD, MIN_LOG_STD
from metaloom.pipeline.types import Array

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_LOG_2 = math.log(2)


class TanhGaussianActions:
    """One action for each of n rows of a network's outputs.

    Attributes:
        mean: [n, A] before the tanh.
        log_std: [n, A], clamped.
        inside: [n, A] bool, False where log_std was clamped.
        deviation: [n, A], std * noise.
        u: [n, A], the actions before the tanh.
        actions: [n, A] in (-1, 1).
        log_prob: [n], log-densities of the actions, joint over their dimensions.
    """

    def __init__(self, outputs: Array, noise: Array) -> None:
        """Draw u = mean + std * noise.

        Args:
            outputs: [n, 2A], means and then log standard deviations.
            noise: [n, A] float32, standard normal.
        """
        A, noise = noise.shape[1], noise.astype(outputs.dtype, copy=False)
        self.mean: Array = outputs[:, :A]
        raw = outputs[:, A:]
        self.log_std: Array = np.clip(raw, MIN_LOG_STD, MAX_LOG_STD)
        self.inside: Array = self.log_std == raw
        self.deviation: Array = np.exp(self.log_std) * noise
        self.u: Array = (u := self.mean + self.deviation)
        self.actions: Array = np.tanh(u)
        # Exact, unlike log(1 - a² + 1e-6) in the paper's code, which is inaccurate for |u| > 6.
        log_slope = 2 * (_LOG_2 - u - np.logaddexp(np.float32(0), -2 * u))
        terms = -0.5 * np.square(noise) - self.log_std - log_slope
        self.log_prob: Array = terms.sum(axis=1) - outputs.dtype.type(A * _HALF_LOG_2PI)

    def backward(self, action_gradient: Array, log_prob_gradient: Array | float) -> Array:
        """Return the gradient of a loss with respect to the outputs, [n, 2A], with the noise held fixed.

        Args:
            action_gradient: [n, A], gradient of the loss with respect to the actions.
            log_prob_gradient: [n, 1] or a scalar, gradient of the loss with respect to the log-densities.
        """
        to_mean = action_gradient * (1 - np.square(self.actions))
        to_mean += 2 * log_prob_gradient * self.actions
        to_log_std = to_mean * self.deviation
        to_log_std -= log_prob_gradient
        to_log_std *= self.inside
        return np.concatenate([to_mean, to_log_std], axis=1)
