"""Gradient steps for a policy and its critic, in torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import SupportsFloat

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.settings import ActorCriticSettings
from metaloom.pipeline.estimation.experience import Experience, StepRows
from metaloom.pipeline.nn.distributions import Distribution, clipped_surrogate, likelihood_ratio
from metaloom.pipeline.nn.flat_networks import FlatParams, renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.types import Array, LearnerState


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_eps: float | None) -> Tensor:
    """Return -mean min(r A, clip(r, 1 ± ε) A) with r = π(a|o) / π_behavior(a|o) or, without ε, -mean A log π(a|o).

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; Mnih et al. 2016, arXiv:1602.01783, section 4.
    """
    if clip_eps is None:
        return -(advantages * log_prob).mean()
    return -clipped_surrogate(likelihood_ratio(log_prob, old_log_prob), advantages, clip_eps).mean()


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip_eps: float) -> Tensor:
    """Return the fraction of steps whose likelihood ratio is outside 1 ± ε."""
    return ((likelihood_ratio(log_prob, old_log_prob) - 1).abs() > clip_eps).double().mean()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip_eps: float | None) -> Tensor:
    """Return ½ mean (V - t)² or, with clipping, ½ mean max((V - t)², (V_old + clip(V - V_old, ±ε) - t)²).

    The clipped form follows OpenAI Baselines' ppo2/model.py. V_old [n] are values from the critic before the update.
    """
    plain = values - targets
    if clip_eps is None:
        return 0.5 * plain.square().mean()
    # A larger clipped error means that the value is out of range and has no gradient. Within the range, exactly 0
    # is added, so that rounding does not determine which of two equal errors is larger.
    change = values.detach() - old_values
    clipped = plain.detach() + (change.clamp(-clip_eps, clip_eps) - change)
    return 0.5 * torch.where(plain.abs() >= clipped.abs(), plain, clipped).square().mean()


POLICY, CRITIC = "policy", "critic"  # name prefixes of the policy's and the critic's arrays in a learner's state


class ActorCriticSteps(ABC):
    """Working copies of a policy, its critic and their optimizers, which gradient steps update in place."""

    policy_params: FlatParams | FlatTensors
    critic_params: FlatParams | FlatTensors
    learned: Array  # mask of the policy parameters that are trained, [D] bool

    def __init__(self, settings: ActorCriticSettings, state: LearnerState) -> None:
        """Restore the optimizers; the subclass has already copied the parameters from the state."""
        self._settings = settings
        for name, flat in ((POLICY, self.policy_params), (CRITIC, self.critic_params)):
            flat.optimize(settings.optimizer, renamed(state.optimizer, f"{name}.", ""))

    @abstractmethod
    def values(self, observations: Array) -> Array:
        """Return the values V [n] of observations [n, O]."""

    @abstractmethod
    def old_log_prob(self, experience: Experience) -> Array:
        """Return the log-probabilities [N] of the actions under the behavior policy."""

    @abstractmethod
    def policy_gradient(self, rows: StepRows, critic_weight: float | None = None) -> SupportsFloat:
        """Store the gradient of the policy's loss, clipped to max_grad_norm if set; return its norm before clipping.

        With `critic_weight`, also store the gradient of `critic_weight` times the critic's loss on the same rows.
        """

    @abstractmethod
    def critic_gradient(self, rows: StepRows, weight: float, max_norm: float | None = None) -> None:
        """Store the gradient of `weight` times the critic's loss, clipped to `max_norm` if given."""

    @abstractmethod
    def describe(self, rows: StepRows, behavior: Mapping[str, Array]) -> dict[str, float]:
        """Return the losses, mean KL, mean entropy and, with clipping, the clip fraction on these rows, by name."""

    def state(self) -> LearnerState:
        """Return the parameters and optimizer states as a LearnerState whose `extra` holds only the critic."""
        optimizer = renamed(self.policy_params.optimizer_state, "", f"{POLICY}.")
        optimizer |= renamed(self.critic_params.optimizer_state, "", f"{CRITIC}.")
        return LearnerState(self.policy_params.copies(), optimizer, self.critic_params.copies())


class TorchSteps(ActorCriticSteps):
    """Gradient steps with autograd, for any network and device."""

    def __init__(
        self, settings: ActorCriticSettings, policy: Policy, critic: Network, state: LearnerState, device: torch.device
    ) -> None:
        self._policy, self._critic, self._device = policy, critic, device
        self.policy_params: FlatTensors = FlatTensors(state.params, device, policy.learned(state.params))
        self.critic_params: FlatTensors = FlatTensors(renamed(state.extra, f"{CRITIC}.", f"{CRITIC}."), device)
        self.learned: Array = self.policy_params.learned
        super().__init__(settings, state)

    def values(self, observations: Array) -> Array:
        with torch.no_grad():
            return self._values(observations).cpu().numpy()

    def old_log_prob(self, experience: Experience) -> Array:
        acted = self._recorded(experience.behavior)
        return acted.log_prob(self._tensor(experience.actions)).cpu().numpy()

    def policy_gradient(self, rows: StepRows, critic_weight: float | None = None) -> Tensor:
        settings = self._settings
        now = self._distribution(rows.observations)
        loss = self._policy_loss(now.log_prob(self._tensor(rows.actions)), rows)
        if settings.entropy_coeff:
            loss = loss - settings.entropy_coeff * now.entropy().mean()
        if critic_weight is not None:
            # One backward pass: for small networks the overhead of autograd dominates.
            self.critic_params.gradient.zero_()
            loss = loss + critic_weight * self._value_loss(rows)
        self.policy_params.backward(loss)
        return self.policy_params.clip_gradient(settings.max_grad_norm)

    def critic_gradient(self, rows: StepRows, weight: float, max_norm: float | None = None) -> None:
        self.critic_params.backward(weight * self._value_loss(rows))
        if max_norm is not None:
            self.critic_params.clip_gradient(max_norm)

    @torch.no_grad()
    def describe(self, rows: StepRows, behavior: Mapping[str, Array]) -> dict[str, float]:
        now = self._distribution(rows.observations)
        values, targets = self._values(rows.observations), self._tensor(rows.targets)
        log_prob = now.log_prob(self._tensor(rows.actions))
        described = {
            "loss": self._policy_loss(log_prob, rows),
            "value_loss": value_loss(values, values, targets, None),
            "kl": self._recorded(behavior).kl(now).mean(),
            "entropy": now.entropy().mean(),
        }
        if (clip_eps := self._settings.policy_clip) is not None:
            described["clip_fraction"] = clip_fraction(log_prob, self._tensor(rows.old_log_prob), clip_eps)
        return {name: float(value) for name, value in described.items()}

    def _policy_loss(self, log_prob: Tensor, rows: StepRows) -> Tensor:
        old_log_prob, advantages = self._tensor(rows.old_log_prob), self._tensor(rows.advantages)
        return policy_loss(log_prob, old_log_prob, advantages, self._settings.policy_clip)

    def _value_loss(self, rows: StepRows) -> Tensor:
        values, old_values = self._values(rows.observations), self._tensor(rows.old_values)
        return value_loss(values, old_values, self._tensor(rows.targets), self._settings.value_clip)

    def _distribution(self, observations: Array) -> Distribution:
        return self._policy.distribution(self.policy_params.params, self._observations(observations))

    def _recorded(self, behavior: Mapping[str, Array]) -> Distribution:
        return self._policy.recorded({name: self._tensor(value) for name, value in behavior.items()})

    def _values(self, observations: Array) -> Tensor:
        return self._critic(self.critic_params.params, self._observations(observations)).squeeze(-1)

    def _observations(self, array: Array) -> Tensor:
        """Convert observations to a floating-point tensor."""
        tensor = self._tensor(array)
        return tensor if tensor.is_floating_point() else tensor.float()

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)
