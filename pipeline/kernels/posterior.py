"""The posterior over a task's latent variable given its context, with derivatives written down, for PEARL's kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.types import Array

MIN_VARIANCE = 1e-7


@dataclass(frozen=True)
class Posterior:
    """Gaussians over the latent variables of K tasks, independent in every dimension.

    Attributes:
        mean: [K, Z].
        variance: [K, Z].
    """

    mean: Array
    variance: Array

    def sample(self, noise: Array) -> Array:
        """Latent variables [K, Z] from standard normal noise [K, Z]."""
        return self.mean + np.sqrt(self.variance) * noise


class GaussianProduct:
    """q(z|c) ∝ ∏ N(z; μ_n, σ²_n), a factor from each transition. Rakelly et al. 2019, arXiv:1903.08254, eq. 2.

    Of the encoder's 2Z outputs the first half are μ_n, and softplus of the second half, at least 1e-7, is σ²_n. The
    product is the Gaussian with 1/σ² = Σ 1/σ²_n and μ = σ² Σ μ_n/σ²_n. The prior is N(0, I).
    """

    def infer(self, outputs: Array) -> Posterior:
        """The posterior given an encoder's outputs [K, C, 2Z]; what follows is about it, until the next `infer`."""
        self._means, self._raw = np.split(outputs, 2, axis=-1)
        self._variances = np.logaddexp(0, self._raw)
        self._precisions = 1 / np.maximum(self._variances, MIN_VARIANCE)
        variance = 1 / self._precisions.sum(1)
        self._posterior = Posterior(variance * (self._means * self._precisions).sum(1), variance)
        return self._posterior

    def kl(self) -> Array:
        """KL(posterior ‖ prior) of every task in nats, [K]: ½ Σ (σ² + μ² - 1 - log σ²)."""
        mean, variance = self._posterior.mean, self._posterior.variance
        return 0.5 * (variance + np.square(mean) - 1 - np.log(variance)).sum(-1)

    def backward(self, latent_errors: Array, noise: Array, kl_weight: float) -> Array:
        """The gradient of a loss + kl_weight · Σ KL with respect to the encoder's outputs, [K, C, 2Z].

        Args:
            latent_errors: [K, Z], the gradient of the loss with respect to the sampled latent variables.
            noise: [K, Z], which they were sampled with.
            kl_weight: of the sum of all tasks' KL divergences.
        """
        mean, variance = self._posterior.mean, self._posterior.variance
        by_mean = latent_errors + kl_weight * mean
        by_variance = 0.5 * latent_errors * noise / np.sqrt(variance) + 0.5 * kl_weight * (1 - 1 / variance)
        # ∂μ/∂(1/σ²_n) = σ² (μ_n - μ) and ∂σ²/∂(1/σ²_n) = -σ⁴.
        by_precision = (by_mean * variance)[:, None] * (self._means - mean[:, None])
        by_precision -= (by_variance * np.square(variance))[:, None]
        # The derivative of softplus(x) is 1 - exp(-softplus(x)).
        slopes = -np.square(self._precisions) * -np.expm1(-self._variances) * (self._variances >= MIN_VARIANCE)
        by_means = (by_mean * variance)[:, None] * self._precisions
        return np.concatenate([by_means, by_precision * slopes], axis=-1)


class Point:
    """z is the mean of the encoder's Z outputs, without doubt, and there is no prior to be near to."""

    def infer(self, outputs: Array) -> Posterior:
        """The posterior given outputs [K, C, Z]; see GaussianProduct."""
        self._shape = outputs.shape
        mean = outputs.mean(1)
        return Posterior(mean, np.zeros_like(mean))

    def kl(self) -> Array:
        """Zeros; see GaussianProduct."""
        return np.zeros(self._shape[0])

    def backward(self, latent_errors: Array, noise: Array, kl_weight: float) -> Array:
        """[K, C, Z]; see GaussianProduct."""
        return np.repeat(latent_errors[:, None] / self._shape[1], self._shape[1], axis=1)


def inference(use_information_bottleneck: bool) -> GaussianProduct | Point:
    """A Gaussian over z with the bottleneck, a point without it."""
    return GaussianProduct() if use_information_bottleneck else Point()
