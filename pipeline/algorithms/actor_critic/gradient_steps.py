"""A policy with its critic while an iteration changes them: the gradient steps that learners are made of, in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.losses import policy_loss, value_loss
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic
from metaloom.pipeline.estimation.experience import Experience, Rows
from metaloom.pipeline.kernels.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.distributions import Distribution, likelihood_ratio
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.vector_optimizers import vector_optimizer
from metaloom.pipeline.types import Array, LearnerState, Params

POLICY, CRITIC = "policy", "critic"
"""Prefixes of what a learner's state holds of each."""

Values = TypeVar("Values")


class Policy(Protocol):
    """Distributions of actions as functions of explicit parameters."""

    def initialize(self, rng: np.random.Generator) -> Params: ...

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]: ...

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Distribution: ...

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution: ...


class GradientSteps(Protocol[Values]):
    """Working copies of a policy, its critic and their optimizers, whichever implementation changes them.

    Attributes:
        learned: [D] bool, which of the policy's parameters learning changes.
    """

    learned: Array

    @property
    def vector(self) -> Array:
        """The policy's parameters [D]."""
        ...

    @property
    def gradient(self) -> Array:
        """Of the policy's last loss, [D]."""
        ...

    def load(self, rows: Rows[Array]) -> Rows[Values]:
        """Bring rows to where the steps are computed."""
        ...

    def values(self, observations: Array) -> Array:
        """V [n] of observations [n, O]."""
        ...

    def old_log_prob(self, experience: Experience) -> Array:
        """Log-probabilities [N] of the actions under the policy that acted."""
        ...

    def policy_gradient(self, rows: Rows[Values]) -> SupportsFloat:
        """Put the gradient of the policy's loss in place, shortened; returns its norm before."""
        ...

    def critic_gradient(self, rows: Rows[Values], weight: float, max_norm: float | None = None) -> None:
        """Put the gradient of `weight` times the critic's loss in place, shortened."""
        ...

    def step_policy(self, learning_rate: float, direction: Array | None = None) -> None:
        """Move the policy against its gradient, or another direction [D]."""
        ...

    def step_critic(self, learning_rate: float) -> None:
        """Move the critic against its gradient."""
        ...

    def describe(self, rows: Rows[Array], behavior: Mapping[str, Array]) -> dict[str, float]:
        """Losses, KL and entropy on all rows, by name."""
        ...

    def state(self) -> LearnerState:
        """Parameters and optimizers as they are now; of `extra` only the critic."""
        ...


class TorchSteps:
    """Gradient steps by autograd, for any networks and on any device; see GradientSteps."""

    def __init__(
        self, settings: ActorCritic, policy: Policy, critic: Network, state: LearnerState, device: torch.device
    ) -> None:
        self._settings, self._policy, self._critic, self._device = settings, policy, critic, device
        learned = policy.learned(state.params)
        self._policy_params = FlatTensors(state.params, device, learned)
        self._critic_params = FlatTensors(prefixed(unprefixed(state.extra, CRITIC), CRITIC), device)
        self.learned = self._policy_params.learned
        self._fixed = None if self.learned.all() else torch.from_numpy(~self.learned).to(device)
        self._policy_optimizer, self._critic_optimizer = (
            vector_optimizer(settings.optimizer, flat.vector, unprefixed(state.optimizer, name))
            for name, flat in ((POLICY, self._policy_params), (CRITIC, self._critic_params))
        )

    @property
    def vector(self) -> Array:
        """See GradientSteps."""
        return self._policy_params.vector.cpu().numpy()

    @property
    def gradient(self) -> Array:
        """See GradientSteps."""
        return self._policy_params.gradient.cpu().numpy()

    def load(self, rows: Rows[Array]) -> Rows[Tensor]:
        """See GradientSteps."""
        return rows.map(self._tensor)

    def values(self, observations: Array) -> Array:
        """See GradientSteps."""
        with torch.no_grad():
            return self._values(self._tensor(observations)).cpu().numpy()

    def old_log_prob(self, experience: Experience) -> Array:
        """See GradientSteps."""
        behavior = {name: self._tensor(value) for name, value in experience.behavior.items()}
        return self._policy.recorded(behavior).log_prob(self._tensor(experience.actions)).cpu().numpy()

    def policy_gradient(self, rows: Rows[Tensor]) -> Tensor:
        """L = policy loss - c H, with the entropy H and its weight c; see GradientSteps."""
        settings = self._settings
        now = self._distribution(rows.observations)
        log_prob = now.log_prob(rows.actions)
        loss = policy_loss(log_prob, rows.old_log_prob, rows.advantages, settings.policy_clip)
        if settings.entropy_coeff:
            loss = loss - settings.entropy_coeff * now.entropy().mean()
        self._policy_params.backward(loss)
        return self._policy_params.clip_gradient(settings.max_grad_norm)

    def critic_gradient(self, rows: Rows[Tensor], weight: float, max_norm: float | None = None) -> None:
        """See GradientSteps."""
        values = self._values(rows.observations)
        loss = weight * value_loss(values, rows.old_values, rows.targets, self._settings.value_clip)
        self._critic_params.backward(loss)
        self._critic_params.clip_gradient(max_norm)

    def step_policy(self, learning_rate: float, direction: Array | None = None) -> None:
        """See GradientSteps."""
        flat = self._policy_params
        before = None if self._fixed is None else flat.vector[self._fixed]
        self._policy_optimizer.step(flat.gradient if direction is None else self._tensor(direction), learning_rate)
        if self._fixed is not None and before is not None:
            # Weight decay moves what has no gradient as well.
            flat.vector[self._fixed] = before

    def step_critic(self, learning_rate: float) -> None:
        """See GradientSteps."""
        self._critic_optimizer.step(self._critic_params.gradient, learning_rate)

    @torch.no_grad()
    def describe(self, rows: Rows[Array], behavior: Mapping[str, Array]) -> dict[str, float]:
        """See GradientSteps."""
        loaded, clip_eps = self.load(rows), self._settings.policy_clip
        now = self._distribution(loaded.observations)
        acted = self._policy.recorded({name: self._tensor(value) for name, value in behavior.items()})
        log_prob = now.log_prob(loaded.actions)
        described = {
            "loss": policy_loss(log_prob, loaded.old_log_prob, loaded.advantages, clip_eps),
            "value_loss": value_loss(self._values(loaded.observations), loaded.old_values, loaded.targets, None),
            "kl": acted.kl(now).mean(),
            "entropy": now.entropy().mean(),
        }
        if clip_eps is not None:
            outside = (likelihood_ratio(log_prob, loaded.old_log_prob) - 1).abs() > clip_eps
            described["clip_fraction"] = outside.double().mean()
        return {name: float(value) for name, value in described.items()}

    def state(self) -> LearnerState:
        """See GradientSteps."""
        optimizer = prefixed(self._policy_optimizer.state, POLICY) | prefixed(self._critic_optimizer.state, CRITIC)
        return LearnerState(self._policy_params.copies(), optimizer, self._critic_params.copies())

    def _distribution(self, observations: Tensor) -> Distribution:
        return self._policy.distribution(self._policy_params.params, observations)

    def _values(self, observations: Tensor) -> Tensor:
        return self._critic(self._critic_params.params, observations).squeeze(-1)

    def _tensor(self, array: Array) -> Tensor:
        # Stored arrays may be read-only, which torch warns of; nothing here writes to them.
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)
