"""Gradient steps of a tanh or ReLU policy and its critic in NumPy, from derivatives that are written down.

The definition is `algorithms/actor_critic/gradient_steps.py`; tests hold this to it. It runs in the precision of the
parameters it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from metaloom.pipeline.estimation.experience import Experience, Rows
from metaloom.pipeline.kernels.flat_networks import FlatNetwork, FlatParams, layer_paths, prefixed, unprefixed
from metaloom.pipeline.nn.distributions import LOG_2PI
from metaloom.pipeline.nn.optimizers import IN_PLACE
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.inference import log_softmax
from metaloom.pipeline.types import Array, LearnerState, Params

LOG_STD = "log_std"


class Objective(Protocol):
    """The options of the losses: see the settings of the algorithms."""

    @property
    def policy_clip(self) -> float | None: ...
    @property
    def value_clip(self) -> float | None: ...
    @property
    def entropy_coeff(self) -> float: ...
    @property
    def max_grad_norm(self) -> float | None: ...


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

    def old_log_prob(self, behavior: Mapping[str, Array], actions: Array) -> Array:
        """Log-probabilities of actions under the policy that acted, [n]."""
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
        self._floor = math.log(min_std)
        self._learn_std = learn_std
        self._z = self._inverse_std = log_std

    @property
    def _clamped(self) -> Array:
        return np.maximum(self._log_std, self._floor)

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Joint log-densities over the action dimensions; see Head."""
        log_std = self._clamped
        self._inverse_std = np.exp(-log_std)
        self._z = (actions - outputs) * self._inverse_std
        return _gaussian_log_prob(self._z, log_std)

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Derivatives with respect to the means; see Head."""
        if self._learn_std:
            pull = np.square(self._z)
            pull -= 1
            np.matmul(weights, pull, out=self._gradient)
            self._gradient -= entropy_coeff
            # Below the floor the standard deviation is the floor's, whatever the parameter.
            self._gradient *= self._log_std >= self._floor
        return weights[:, None] * self._z * self._inverse_std

    def old_log_prob(self, behavior: Mapping[str, Array], actions: Array) -> Array:
        """Joint log-densities; see Head."""
        log_std = behavior[LOG_STD]
        return _gaussian_log_prob((actions - behavior["mean"]) * np.exp(-log_std), log_std)

    def entropy(self, outputs: Array) -> float:
        """Does not depend on the outputs; see Head."""
        del outputs
        return float(self._clamped.sum(dtype=np.float64)) + 0.5 * len(self._log_std) * (LOG_2PI + 1)

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Mean KL over rows; see Head."""
        log_std, old = self._clamped.astype(np.float64), behavior[LOG_STD].astype(np.float64)
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
            gradient += entropy_coeff / n * probs * (log_probs + entropies)
        return gradient

    def old_log_prob(self, behavior: Mapping[str, Array], actions: Array) -> Array:
        """As they were recorded; see Head."""
        return behavior["log_probs"][np.arange(len(actions)), actions]

    def entropy(self, outputs: Array) -> float:
        """Mean over rows; see Head."""
        log_probs = log_softmax(outputs)
        return -float((np.exp(log_probs) * log_probs).sum(-1).mean(dtype=np.float64))

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Mean KL over rows; see Head."""
        old, new = behavior["log_probs"], log_softmax(outputs)
        return float((np.exp(old) * (old - new)).sum(-1).mean(dtype=np.float64))


def policy_loss(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float | None) -> float:
    """Mean loss of n actions; see `algorithms/actor_critic/losses.py`."""
    if clip_eps is None:
        return -float((advantages * log_prob).mean())
    plain, clipped = _surrogates(log_prob, old_log_prob, advantages, clip_eps)
    return -float(np.minimum(plain, clipped).mean())


def policy_slopes(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float | None) -> Array:
    """Derivatives of the policy's loss with respect to the log-probabilities, [n]."""
    if clip_eps is None:
        return advantages / -len(advantages)
    plain, clipped = _surrogates(log_prob, old_log_prob, advantages, clip_eps)
    # Where clipping lowers the objective, the minimum no longer depends on the policy.
    return np.where(plain <= clipped, plain, plain.dtype.type(0)) / -len(plain)


def value_slopes(values: Array, old_values: Array, targets: Array, clip_eps: float | None) -> Array:
    """Derivatives of the critic's loss with respect to the values, [n]."""
    errors = values - targets
    if clip_eps is not None:
        change = values - old_values
        clipped = old_values + np.clip(change, -clip_eps, clip_eps) - targets
        # Within the range the two errors are one number, and rounding must not decide between them. Where the clipped
        # one is larger, the value lies outside the range and moving it changes nothing.
        uses_plain = (np.abs(change) <= clip_eps) | (np.square(errors) >= np.square(clipped))
        errors = np.where(uses_plain, errors, errors.dtype.type(0))
    return errors / len(errors)


class FusedSteps:
    """Gradient steps without autograd; see GradientSteps.

    Attributes:
        learned: [D] bool, which of the policy's parameters learning changes.
    """

    def __init__(
        self,
        objective: Objective,
        networks: tuple[tuple[str, NetworkSpec], tuple[str, NetworkSpec]],
        optimizer: str,
        state: LearnerState,
        *,
        min_std: float,
        learn_std: bool,
    ) -> None:
        """Working copies of what changes.

        Args:
            objective: options of the losses.
            networks: prefix of the parameters and spec, of the policy and of the critic.
            optimizer: of IN_PLACE.
            state: parameters of the policy, of the critic in `extra`, and of their optimizers.
            min_std: floor of the standard deviation, where the actions are continuous.
            learn_std: whether learning changes it.
        """
        (policy_prefix, policy_spec), (critic_prefix, critic_spec) = networks
        self._objective, self._prefixes = objective, ("policy", critic_prefix)
        self._policy = FlatParams(state.params)
        self._critic = FlatParams(prefixed(unprefixed(state.extra, critic_prefix), critic_prefix))
        names = state.params.items()
        self.learned = np.concatenate([np.full(value.size, learn_std or name != LOG_STD) for name, value in names])
        self._policy_network = _network(self._policy, policy_prefix, policy_spec)
        self._critic_network = _network(self._critic, critic_prefix, critic_spec)
        self._head = _head(self._policy, min_std, learn_std)
        self._optimizers = [IN_PLACE[optimizer].of(unprefixed(state.optimizer, name)) for name in self._prefixes]

    @property
    def vector(self) -> Array:
        """The policy's parameters [D]."""
        return self._policy.vector

    @property
    def gradient(self) -> Array:
        """Of the policy's last loss, [D]."""
        return self._policy.gradient

    def values(self, observations: Array) -> Array:
        """V [n] of observations [n, O]."""
        return self._critic_network.forward(observations)[:, 0]

    def old_log_prob(self, experience: Experience) -> Array:
        """Log-probabilities [N] of the actions under the policy that acted."""
        return self._head.old_log_prob(experience.behavior, experience.actions)

    def policy_gradient(self, rows: Rows, critic_weight: float | None = None) -> float:
        """Put the gradient of the policy's loss in place, and with a weight the critic's; see GradientSteps."""
        if critic_weight is not None:
            self.critic_gradient(rows, critic_weight)
        objective = self._objective
        outputs = self._policy_network.forward(rows.observations)
        log_prob = self._head.log_prob(outputs, rows.actions)
        slopes = policy_slopes(log_prob, rows.old_log_prob, rows.advantages, objective.policy_clip)
        self._policy_network.backward(self._head.backward(slopes, objective.entropy_coeff))
        return self._policy.clip_gradient(objective.max_grad_norm)

    def critic_gradient(self, rows: Rows, weight: float, max_norm: float | None = None) -> None:
        """Put the gradient of `weight` times the critic's loss in place, shortened."""
        slopes = value_slopes(self.values(rows.observations), rows.old_values, rows.targets, self._objective.value_clip)
        self._critic_network.backward(weight * slopes[:, None])
        self._critic.clip_gradient(max_norm)

    def step_policy(self, learning_rate: float, direction: Array | None = None) -> None:
        """Move the policy against its gradient, or another direction [D]."""
        gradient = self._policy.gradient if direction is None else direction
        self._optimizers[0].step(self._policy.vector, gradient, learning_rate)

    def step_critic(self, learning_rate: float) -> None:
        """Move the critic against its gradient."""
        self._optimizers[1].step(self._critic.vector, self._critic.gradient, learning_rate)

    def describe(self, rows: Rows, behavior: Mapping[str, Array]) -> dict[str, float]:
        """Losses, KL and entropy on all rows, by name."""
        clip_eps = self._objective.policy_clip
        outputs = self._policy_network.forward(rows.observations)
        log_prob = self._head.log_prob(outputs, rows.actions)
        values = self.values(rows.observations)
        described = {
            "loss": policy_loss(log_prob, rows.old_log_prob, rows.advantages, clip_eps),
            "value_loss": 0.5 * float(np.square(values - rows.targets, dtype=np.float64).mean()),
            "kl": self._head.kl(behavior, outputs),
            "entropy": self._head.entropy(outputs),
        }
        if clip_eps is not None:
            outside = np.abs(np.exp(log_prob - rows.old_log_prob) - 1) > clip_eps
            described["clip_fraction"] = float(outside.mean())
        return described

    def state(self) -> LearnerState:
        """Parameters and optimizers as they are now; of `extra` only the critic."""
        optimizer: Params = {}
        for prefix, of in zip(self._prefixes, self._optimizers, strict=True):
            optimizer |= prefixed(of.state, prefix)
        return LearnerState(self._policy.copies(), optimizer, self._critic.copies())


def _network(flat: FlatParams, prefix: str, spec: NetworkSpec) -> FlatNetwork:
    return FlatNetwork(flat, layer_paths(prefix, len(spec.hidden_sizes)), spec.activation)  # pyright: ignore


def _head(policy: FlatParams, min_std: float, learn_std: bool) -> Head:
    if LOG_STD not in policy.params:
        return CategoricalHead()
    return GaussianHead(policy.params[LOG_STD], policy.gradients[LOG_STD], min_std, learn_std=learn_std)


def _surrogates(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float) -> tuple[Array, Array]:
    """Return r A and clip(r, 1 ± ε) A."""
    ratio = np.exp(log_prob - old_log_prob)
    return ratio * advantages, np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantages


def _gaussian_log_prob(z: Array, log_std: Array) -> Array:
    """Joint log-densities [n] of standardized actions z [n, A] with log σ, [A] or [n, A]."""
    return -0.5 * np.square(z).sum(-1) - (log_std.sum(-1) + 0.5 * z.shape[-1] * LOG_2PI)
