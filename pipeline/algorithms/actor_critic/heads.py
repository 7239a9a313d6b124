"""From a network's outputs to a distribution of actions: probabilities and their derivatives, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from metaloom.pipeline.policies.inference import log_softmax
from metaloom.pipeline.types import Array

LOG_2PI = math.log(2 * math.pi)


class Head(Protocol):
    """The distribution of actions given a network's outputs for n rows."""

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Log-probabilities of actions, [n]; the next `backward` is about them."""
        ...

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Derivatives of Σ weights · log_prob - entropy_coeff · mean entropy with respect to the outputs, [n, out].

        Writes the derivatives with respect to the head's own parameters where their gradient is kept.
        """
        ...

    def entropy(self, outputs: Array) -> float:
        """Mean entropy in nats."""
        ...

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Mean KL(policy that acted ‖ this policy) in nats."""
        ...


class GaussianHead:
    """Outputs are means; the standard deviations are parameters."""

    def __init__(self, log_std: Array, log_std_gradient: Array, min_std: float, *, learn_std: bool) -> None:
        self._log_std, self._gradient = log_std, log_std_gradient
        self._floor = np.float32(math.log(min_std))
        self._learn_std = learn_std
        self._z = self._inverse_std = np.empty(0, np.float32)

    @property
    def _clamped(self) -> Array:
        return np.maximum(self._log_std, self._floor)

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Joint log-densities over the action dimensions; see Head."""
        log_std = self._clamped
        self._inverse_std = np.exp(-log_std)
        self._z = (actions - outputs) * self._inverse_std
        return gaussian_log_prob(self._z, log_std)

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Derivatives with respect to the means; see Head."""
        if self._learn_std:
            pull = np.square(self._z)
            pull -= 1
            np.matmul(weights, pull, out=self._gradient)
            self._gradient -= np.float32(entropy_coeff)
            # Below the floor the standard deviation is the floor's, whatever the parameter.
            self._gradient *= self._log_std >= self._floor
        return weights[:, None] * self._z * self._inverse_std

    def entropy(self, outputs: Array) -> float:
        """Does not depend on the outputs; see Head."""
        del outputs
        return float(self._clamped.sum(dtype=np.float64)) + 0.5 * len(self._log_std) * (LOG_2PI + 1)

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Mean KL over rows; see Head."""
        log_std, old = self._clamped.astype(np.float64), behavior["log_std"].astype(np.float64)
        squares = np.square(behavior["mean"] - outputs, dtype=np.float64) + np.exp(2 * old)
        return float((squares / (2 * np.exp(2 * log_std)) - 0.5 + log_std - old).sum(-1).mean())


class CategoricalHead:
    """Outputs are logits, one per action."""

    def __init__(self) -> None:
        self._log_probs: Array = np.empty((0, 0), np.float32)
        self._actions: Array = np.empty(0, np.int64)

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Log-probabilities of actions [n] int64; see Head."""
        self._log_probs, self._actions = log_softmax(outputs), actions
        return self._log_probs[np.arange(len(actions)), actions]

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Derivatives with respect to the logits; see Head."""
        log_probs, n = self._log_probs, len(self._actions)
        probs = np.exp(log_probs)
        gradient: Array = -weights[:, None] * probs
        gradient[np.arange(n), self._actions] += weights
        if entropy_coeff:
            entropies = -(probs * log_probs).sum(-1, keepdims=True)
            gradient += np.float32(entropy_coeff / n) * probs * (log_probs + entropies)
        return gradient

    def entropy(self, outputs: Array) -> float:
        """Mean over rows; see Head."""
        log_probs = log_softmax(outputs)
        return -float((np.exp(log_probs) * log_probs).sum(-1).mean(dtype=np.float64))

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Mean KL over rows; see Head."""
        old, new = behavior["log_probs"], log_softmax(outputs)
        return float((np.exp(old) * (old - new)).sum(-1).mean(dtype=np.float64))


def gaussian_log_prob(z: Array, log_std: Array) -> Array:
    """Joint log-densities [n] of standardized actions z [n, A] with log σ, [A] or [n, A]."""
    A = z.shape[-1]
    return -0.5 * np.square(z).sum(-1) - (log_std.sum(-1) + np.float32(0.5 * A * LOG_2PI))
