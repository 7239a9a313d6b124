"""Gradient steps of a policy and its critic in NumPy, with hand-written derivatives, in the parameters' precision.

The reference definition is algorithms/actor_critic/gradient_steps.py, against which this kernel is tested.
"""

import math
from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import CRITIC, ActorCriticSteps
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCriticSettings
from metaloom.pipeline.estimation.experience import Experience, StepRows
from metaloom.pipeline.nn.distributions import LOG_2PI
from metaloom.pipeline.nn.flat_networks import FlatNetwork, FlatParams, renamed
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.inference import log_softmax
from metaloom.pipeline.types import Array, LearnerState

LOG_STD = "log_std"


class GaussianHead:
    """Head of a Gaussian policy, whose network outputs means and whose standard deviations are parameters."""

    def __init__(self, log_std: Array, log_std_gradient: Array, min_std: float, *, learn_std: bool) -> None:
        self._log_std, self._gradient = log_std, log_std_gradient
        self._floor = math.log(min_std)
        self._learn_std = learn_std
        self._z = self._inverse_std = log_std

    @property
    def _clamped(self) -> Array:
        return np.maximum(self._log_std, self._floor)

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Return the log-densities [n] of actions, joint over dimensions; the next `backward` differentiates them."""
        log_std = self._clamped
        self._inverse_std = np.exp(-log_std)
        self._z = (actions - outputs) * self._inverse_std
        return _gaussian_log_prob(self._z, log_std)

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Return the gradient of Σ weights · log_prob - entropy_coeff · mean entropy with respect to the means, [n, A].

        If standard deviations are learned, also write the gradient with respect to their logarithms.
        """
        if self._learn_std:
            pull = np.square(self._z)
            pull -= 1
            np.matmul(weights, pull, out=self._gradient)
            self._gradient -= entropy_coeff
            # Below the floor, the standard deviation does not depend on the parameter.
            self._gradient *= self._log_std >= self._floor
        return weights[:, None] * self._z * self._inverse_std

    def old_log_prob(self, behavior: Mapping[str, Array], actions: Array) -> Array:
        """Return the joint log-densities of actions under the behavior policy, [n]."""
        log_std = behavior[LOG_STD]
        return _gaussian_log_prob((actions - behavior["mean"]) * np.exp(-log_std), log_std)

    def entropy(self, outputs: Array) -> float:
        """Return the mean entropy in nats, which does not depend on the outputs."""
        return float(self._clamped.sum(dtype=np.float64)) + 0.5 * len(self._log_std) * (LOG_2PI + 1)

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Return the mean KL(behavior policy ‖ this policy) in nats."""
        log_std, old = self._clamped.astype(np.float64), behavior[LOG_STD].astype(np.float64)
        squares = np.square(behavior["mean"] - outputs, dtype=np.float64) + np.exp(2 * old)
        return float((squares / (2 * np.exp(2 * log_std)) - 0.5 + log_std - old).sum(-1).mean())


class CategoricalHead:
    """Head of a categorical policy, whose network outputs one logit per action."""

    def __init__(self) -> None:
        self._log_probs: Array = np.empty((0, 0), np.float32)
        self._actions: Array = np.empty(0, np.int64)

    def log_prob(self, outputs: Array, actions: Array) -> Array:
        """Return the log-probabilities of actions [n] int64; the next `backward` differentiates them."""
        self._log_probs, self._actions = log_softmax(outputs), actions
        return self._log_probs[np.arange(len(actions)), actions]

    def backward(self, weights: Array, entropy_coeff: float) -> Array:
        """Return the gradient of Σ weights · log_prob - entropy_coeff · mean entropy with respect to the logits."""
        log_probs, n = self._log_probs, len(self._actions)
        probs = np.exp(log_probs)
        gradient: Array = -weights[:, None] * probs
        gradient[np.arange(n), self._actions] += weights
        if entropy_coeff:
            entropies = -(probs * log_probs).sum(-1, keepdims=True)
            gradient += entropy_coeff / n * probs * (log_probs + entropies)
        return gradient

    def old_log_prob(self, behavior: Mapping[str, Array], actions: Array) -> Array:
        """Return the recorded log-probabilities of actions under the behavior policy, [n]."""
        return behavior["log_probs"][np.arange(len(actions)), actions]

    def entropy(self, outputs: Array) -> float:
        """Return the mean entropy in nats."""
        log_probs = log_softmax(outputs)
        return -float((np.exp(log_probs) * log_probs).sum(-1).mean(dtype=np.float64))

    def kl(self, behavior: Mapping[str, Array], outputs: Array) -> float:
        """Return the mean KL(behavior policy ‖ this policy) in nats."""
        old, new = behavior["log_probs"], log_softmax(outputs)
        return float((np.exp(old) * (old - new)).sum(-1).mean(dtype=np.float64))


def policy_loss(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float | None) -> float:
    """Return the mean loss over n actions: PPO's clipped loss, or -advantage · log_prob if `clip_eps` is None."""
    if clip_eps is None:
        return -float((advantages * log_prob).mean())
    plain, clipped = _surrogates(log_prob, old_log_prob, advantages, clip_eps)
    return -float(np.minimum(plain, clipped).mean())


def policy_slopes(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float | None) -> Array:
    """Return the gradient of the policy loss with respect to the log-probabilities, [n]."""
    if clip_eps is None:
        return advantages / -len(advantages)
    plain, clipped = _surrogates(log_prob, old_log_prob, advantages, clip_eps)
    # Where clipping lowers the objective, the minimum no longer depends on the policy.
    return np.where(plain <= clipped, plain, plain.dtype.type(0)) / -len(plain)


def value_slopes(values: Array, old_values: Array, targets: Array, clip_eps: float | None) -> Array:
    """Return the gradient of the critic's loss with respect to the values, [n]."""
    errors = values - targets
    if clip_eps is not None:
        change = values - old_values
        clipped = old_values + np.clip(change, -clip_eps, clip_eps) - targets
        # Within the range, both errors are equal, and rounding must not determine which is used. If the clipped one is
        # larger, the value is out of range and has no gradient.
        uses_plain = (np.abs(change) <= clip_eps) | (np.square(errors) >= np.square(clipped))
        errors = np.where(uses_plain, errors, errors.dtype.type(0))
    return errors / len(errors)


class FusedSteps(ActorCriticSteps):
    """Gradient steps without autograd."""

    def __init__(
        self,
        settings: ActorCriticSettings,
        policy: NetworkSpec,
        critic: NetworkSpec,
        state: LearnerState,
        *,
        prefix: str,
        min_std: float,
        learn_std: bool,
    ) -> None:
        self.policy_params: FlatParams = FlatParams(state.params)
        self.critic_params: FlatParams = FlatParams(renamed(state.extra, f"{CRITIC}.", f"{CRITIC}."))
        learned = [np.full(value.size, learn_std or name != LOG_STD) for name, value in state.params.items()]
        self.learned: Array = np.concatenate(learned)
        super().__init__(settings, state)
        self._policy_network = FlatNetwork.of(prefix, policy, self.policy_params)
        self._critic_network = FlatNetwork.of(CRITIC, critic, self.critic_params)
        self._head = CategoricalHead()
        if LOG_STD in state.params:
            flat = self.policy_params
            self._head = GaussianHead(flat.params[LOG_STD], flat.gradients[LOG_STD], min_std, learn_std=learn_std)

    def values(self, observations: Array) -> Array:
        return self._critic_network.forward(observations)[:, 0]

    def old_log_prob(self, experience: Experience) -> Array:
        return self._head.old_log_prob(experience.behavior, experience.actions)

    def policy_gradient(self, rows: StepRows, critic_weight: float | None = None) -> float:
        if critic_weight is not None:
            self.critic_gradient(rows, critic_weight)
        settings = self._settings
        outputs = self._policy_network.forward(rows.observations)
        log_prob = self._head.log_prob(outputs, rows.actions)
        slopes = policy_slopes(log_prob, rows.old_log_prob, rows.advantages, settings.policy_clip)
        self._policy_network.backward(self._head.backward(slopes, settings.entropy_coeff))
        return self.policy_params.clip_gradient(settings.max_grad_norm)

    def critic_gradient(self, rows: StepRows, weight: float, max_norm: float | None = None) -> None:
        slopes = value_slopes(self.values(rows.observations), rows.old_values, rows.targets, self._settings.value_clip)
        self._critic_network.backward(weight * slopes[:, None])
        self.critic_params.clip_gradient(max_norm)

    def describe(self, rows: StepRows, behavior: Mapping[str, Array]) -> dict[str, float]:
        clip_eps = self._settings.policy_clip
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


def _surrogates(log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float) -> tuple[Array, Array]:
    """Return r A and clip(r, 1 ± ε) A for likelihood ratios r and advantages A, [n] each."""
    ratio = np.exp(log_prob - old_log_prob)
    return ratio * advantages, np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantages


def _gaussian_log_prob(z: Array, log_std: Array) -> Array:
    """Return the joint log-densities [n] of standardized actions z [n, A], given log σ, [A] or [n, A]."""
    return -0.5 * np.square(z).sum(-1) - (log_std.sum(-1) + 0.5 * z.shape[-1] * LOG_2PI)
