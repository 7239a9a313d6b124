"""What keeps a policy's outputs small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.algorithms.off_policy.tanh_gaussian import TanhGaussianSample
from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Regularization:
    """Weights of penalties on a policy's actions tanh(u), u from N(μ, σ²).

    Attributes:
        mean: of the mean of μ² over the dimensions of the action.
        log_std: of the mean of (log σ)² over them.
        pre_activation: of ‖u‖².
    """

    mean: float
    log_std: float
    pre_activation: float

    def penalty(self, sample: TanhGaussianSample, outputs: Array, noise: Array) -> tuple[float, Array]:
        """The sum of all rows' penalties, and its gradient with respect to the policy's outputs, [n, 2A].

        Args:
            sample: of n actions.
            outputs: [n, 2A], of the policy.
            noise: [n, A], of the sample.
        """
        A = noise.shape[1]
        deviation = np.exp(sample.log_std) * noise
        u = sample.mean + deviation
        by_mean, by_log_std = self.mean / A * sample.mean, self.log_std / A * sample.log_std
        by_u = self.pre_activation * u
        value = float((by_mean * sample.mean + by_log_std * sample.log_std + by_u * u).sum(dtype=np.float64))
        inside = sample.log_std == outputs[:, A:]
        return value, 2 * np.concatenate([by_mean + by_u, (by_log_std + by_u * deviation) * inside], axis=1)
