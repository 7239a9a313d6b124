"""Soft actor-critic in torch: the gradient step for any network and device, and the learner.

Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1; equation numbers refer to that paper unless otherwise stated.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.off_policy.learner import Layout, OffPolicyLearner, Stored, TorchGradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.parts import TwinQ, sample, tensor_like, transitions_like
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch

METRICS = (
    "policy_loss", "q_loss", "temperature_loss", "temperature", "entropy", "q_mean", "target_mean", "gradient_norm",
    "q_gradient_norm",
)  # fmt: skip
"""Names of the metrics that a gradient step returns."""
TWINS = ("q1", "q2")  # name prefixes of the Q-functions
LAYOUT: Layout = {
    "policy": Stored("params", f"{POLICY_NETWORK}.", f"{POLICY_NETWORK}.", "policy."),
    "q": Stored("extra", "q", "q", "q."),
    "targets": Stored("extra", "target_q", "q"),
    "alpha": Stored("extra", "log_alpha", "log_alpha", "alpha."),
}
"""Locations of the policy, both Q-functions, their target networks and the scalar log temperature in the state."""


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, num_actions: int) -> Tensor:
    """Return -log α · mean( log π(a|o) + H̄ ) with H̄ = -A. Eq. 18 with log α for α, which keeps α positive."""
    return -log_alpha * (log_prob.detach() - num_actions).mean()


def td_targets(
    rewards: Tensor, continuing: Tensor, next_values: Tensor, next_log_prob: Tensor, alpha: Tensor
) -> Tensor:
    """Return the TD targets y = r + γ (1 - terminated) ( min_j Q̄_j(o', a') - α log π(a'|o') ), [n] (eqs. 2 and 3).

    `continuing` is γ (1 - terminated), and `next_values` has shape [2, n].
    """
    return rewards + continuing * (next_values.amin(0) - alpha * next_log_prob)


def q_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Return the average over both Q-functions [2, n] of mean (Q(o, a) - y)². Eq. 5, times two."""
    return (values - targets).square().mean()


def policy_loss(alpha: Tensor, log_prob: Tensor, values: Tensor) -> Tensor:
    """Return the mean of α log π(a|o) - min_j Q_j(o, a) for reparameterized actions a. Eq. 9; values are [2, n]."""
    return (alpha * log_prob - values.amin(0)).mean()


class SACDefinition(TorchGradientSteps[Array]):
    """SAC's gradient steps in torch, on working copies of the networks and the temperature."""

    layout: ClassVar[Layout] = LAYOUT
    _settings: SAC

    def copied(self, name: str, state: LearnerState) -> FlatTensors:
        """Return a working copy of a part of a state, with both Q-functions in one vector."""
        if name not in ("q", "targets"):
            return super().copied(name, state)
        return TwinQ(self._networks[1], LAYOUT[name].of(state), self._device)

    def prepare(self) -> None:
        self._network, self._policy = self._networks[0], self.copies["policy"]
        self._q, self._targets = (cast(TwinQ, self.copies[name]) for name in ("q", "targets"))

    def step(self, minibatch: Minibatch, noise: Array) -> dict[str, Tensor]:
        """Update the temperature, the Q-functions and the policy, then the target networks.

        The noise [2n, A] is used for actions at the n observations, then at the next observations.
        """
        settings, params, rates = self._settings, self._policy.params, self._rates
        batch = transitions_like(self._policy.vector, merged(minibatch))
        now_noise, next_noise = tensor_like(self._policy.vector, noise).chunk(2)
        now = sample(self._network(params, batch.observations), now_noise)
        with torch.no_grad():
            following = sample(self._network(params, batch.next_observations), next_noise)

        log_alpha = self.copies["alpha"].params["log_alpha"]
        loss_alpha = temperature_loss(log_alpha, now.log_prob, now.actions.shape[1])
        if settings.learn_ent_coeff:
            self.copies["alpha"].down(loss_alpha, rates["alpha"])
        alpha = log_alpha.detach().exp()

        rewards = batch.rewards
        if settings.standardize_rew:
            rewards = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
        next_values = self._targets(batch.next_observations, following.actions)
        continuing = self._discount * (1 - batch.terminated)
        targets = td_targets(settings.rew_scale * rewards, continuing, next_values, following.log_prob, alpha)

        values = self._q(batch.observations, batch.actions, learn=True)
        loss_q = q_loss(values, targets)
        q_norm = self._q.down(loss_q, rates["q"], settings.max_grad_norm)

        loss_policy = policy_loss(alpha, now.log_prob, self._q(batch.observations, now.actions))
        policy_norm = self._policy.down(loss_policy, rates["policy"], settings.max_grad_norm)

        if self.counts_to(settings.target_update_intvl):
            # Q̄ ← τ Q̄ + (1 - τ) Q
            self._targets.vector.mul_(settings.tau).add_(self._q.vector, alpha=1 - settings.tau)
        losses = loss_policy, loss_q, loss_alpha
        described = *losses, alpha, -now.log_prob.mean(), values.mean(), targets.mean(), policy_norm, q_norm
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))


class SACLearner(OffPolicyLearner[object, Array]):
    definition: ClassVar[type[TorchGradientSteps[Any]]] = SACDefinition
    metrics: ClassVar[tuple[str, ...]] = METRICS
    finite: ClassVar[Mapping[str, str]] = {"policy": "the policy", "q": "the Q-functions"}
    settings: SAC

    def __init__(self, settings: SAC, setup: Setup) -> None:
        super().__init__(settings, setup, discrete=False)
        policy = setup.policy.network_spec(setup, 2 * setup.action_size, activation="relu")
        critic = setup.policy.critic(settings.critic_hidden_sizes)
        q = critic.network_spec(setup, 1, extra_size=setup.action_size, activation="relu")
        self.networks: tuple[Network, Network] = build_network(POLICY_NETWORK, policy), build_network(TWINS[0], q)
        rates = {name: settings.learning_rate for name in ("policy", "q", "alpha")}
        self.set_up(rates, *self.networks)

    def initialize(self, *, run_seed: int) -> LearnerState:
        rng = generator(run_seed, "initialize")
        policy, first, second = (network.initialize(rng) for network in (*self.networks, self.networks[1]))
        q = first | renamed(second, *TWINS)
        alpha = {"log_alpha": np.array(np.log(self.settings.ent_coeff_init), np.float32)}
        targets = {name: value.copy() for name, value in q.items()}
        return self.first_state({"policy": policy, "q": q, "targets": targets, "alpha": alpha})

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Array:
        return rng.standard_normal((2 * minibatch.transitions.rewards.size, self._setup.action_size), np.float32)

    def described(self, state: LearnerState) -> Metrics:
        return {"learning_rate": self.rates(state)["policy"]}
