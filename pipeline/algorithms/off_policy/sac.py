"""Soft actor-critic in torch: the definition of its gradient step, for any networks and on any device, and its learner.

Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1; equations are of that paper unless another is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Kernel, Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.learner import Counters, GradientSteps, OffPolicyLearner, merged
from metaloom.pipeline.algorithms.off_policy.parts import TwinQ, sample, tensor_like, transitions_like
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.flat_tensors import Descent, FlatTensors
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap, Params

METRICS = (
    "policy_loss",
    "q_loss",
    "temperature_loss",
    "temperature",
    "entropy",
    "q_mean",
    "target_mean",
    "gradient_norm",
    "q_gradient_norm",
)
"""Names of the metrics of a gradient step."""
TWINS = ("q1", "q2")
"""Prefixes of the Q-functions."""
TARGET = "target_"
"""Prefix of names in the target networks."""
TRAINED = ("policy", "q", "alpha")
"""Prefixes of the optimizers' states."""


@dataclass(frozen=True)
class SACArrays:
    """Parameters by name, and the states of the optimizers.

    Attributes:
        policy: Policy parameters.
        q: Parameters of both Q-functions, q1.* and then q2.*.
        targets: Parameters of the target networks, under the same names.
        log_alpha: [].
        optimizers: States of the optimizers.
    """

    policy: Params
    q: Params
    targets: Params
    log_alpha: Array
    optimizers: Mapping[str, Params]

    @classmethod
    def of(cls, state: LearnerState) -> SACArrays:
        """Return the arrays of a state, not copied."""
        q, targets = Params(), Params()
        for name, value in state.extra.items():
            if name.startswith(TARGET):
                targets[name.removeprefix(TARGET)] = value
            elif name.startswith(TWINS):
                q[name] = value
        optimizers: dict[str, Params] = {name: unprefixed(state.optimizer, name) for name in TRAINED}
        return cls(state.params, q, targets, state.extra["log_alpha"], optimizers)

    def state(self, counters: Counters) -> LearnerState:
        """Return a learner state of these arrays."""
        optimizer, extra = Params(), dict(self.q)
        for name in TRAINED:
            optimizer |= prefixed(self.optimizers[name], name)
        for name, value in self.targets.items():
            extra[f"{TARGET}{name}"] = value
        return LearnerState(self.policy, optimizer, extra | {"log_alpha": self.log_alpha} | counters.arrays())


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, num_actions: int) -> Tensor:
    """Return -log α · mean( log π(a|o) + H̄ ), H̄ = -A. Eq. 18 with log α for α, which thus stays positive."""
    return -log_alpha * (log_prob.detach() - num_actions).mean()


def td_targets(
    rewards: Tensor, continuing: Tensor, next_values: Tensor, next_log_prob: Tensor, alpha: Tensor
) -> Tensor:
    """Return the TD targets y = r + γ (1 - terminated) ( min_j Q̄_j(o', a') - α log π(a'|o') ), Eq. 2, 3.

    Args:
        rewards: [n], scaled.
        continuing: [n], γ where the task continues and 0 where it terminated.
        next_values: [2, n], of both target networks.
        next_log_prob: [n].
        alpha: [].
    """
    return rewards + continuing * (next_values.amin(0) - alpha * next_log_prob)


def q_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Return the average over both Q-functions [2, n] of mean (Q(o, a) - y)². Eq. 5, times two."""
    return (values - targets).square().mean()


def policy_loss(alpha: Tensor, log_prob: Tensor, values: Tensor) -> Tensor:
    """Return the mean of α log π(a|o) - min_j Q_j(o, a) with a by reparameterization. Eq. 9; values are [2, n]."""
    return (alpha * log_prob - values.amin(0)).mean()


class SACDefinition:
    """Working copies of policy, Q-functions, targets and temperature during an iteration."""

    def __init__(
        self,
        settings: SAC,
        policy: Network,
        q: Network,
        state: LearnerState,
        *,
        discount: float,
        learning_rate: float,
        device: torch.device,
    ) -> None:
        self._settings, self._discount, self._learning_rate, self._network = settings, discount, learning_rate, policy
        self._counters, arrays = Counters.of(state), SACArrays.of(state)
        self.policy: FlatTensors = FlatTensors(arrays.policy, device)
        self.q: TwinQ = TwinQ(q, arrays.q, device)
        self._targets = TwinQ(q, arrays.targets, device)
        self._log_alpha = FlatTensors({"log_alpha": arrays.log_alpha}, device)
        trained = {"policy": self.policy, "q": self.q, "alpha": self._log_alpha}
        self._descent = {
            name: Descent(settings.optimizer, trained[name], kept) for name, kept in arrays.optimizers.items()
        }

    def step(self, minibatch: Minibatch, noise: Array) -> dict[str, Tensor]:
        """Take a step down each loss, of temperature, Q-functions and policy, and then move the targets.

        Args:
            minibatch: n transitions.
            noise: [2n, A], standard normal: of the actions at the observations, then at the next ones.
        """
        settings, params, rate = self._settings, self.policy.params, self._learning_rate
        batch = transitions_like(self.policy.vector, merged(minibatch))
        now_noise, next_noise = tensor_like(self.policy.vector, noise).chunk(2)
        now = sample(self._network(params, batch.observations), now_noise)
        with torch.no_grad():
            following = sample(self._network(params, batch.next_observations), next_noise)

        log_alpha = self._log_alpha.params["log_alpha"]
        loss_alpha = temperature_loss(log_alpha, now.log_prob, now.actions.shape[1])
        if settings.learn_ent_coeff:
            self._descent["alpha"].down(loss_alpha, rate)
        alpha = log_alpha.detach().exp()

        rewards = batch.rewards
        if settings.standardize_rew:
            rewards = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
        next_values = self._targets(batch.next_observations, following.actions)
        continuing = self._discount * (1 - batch.terminated)
        targets = td_targets(settings.rew_scale * rewards, continuing, next_values, following.log_prob, alpha)

        values = self.q(batch.observations, batch.actions, learn=True)
        loss_q = q_loss(values, targets)
        q_norm = self._descent["q"].down(loss_q, rate, settings.max_grad_norm)

        loss_policy = policy_loss(alpha, now.log_prob, self.q(batch.observations, now.actions))
        policy_norm = self._descent["policy"].down(loss_policy, rate, settings.max_grad_norm)

        self._counters.gradient_steps += 1
        if self._counters.gradient_steps % settings.target_update_intvl == 0:
            # Q̄ ← τ Q̄ + (1 - τ) Q
            self._targets.vector.mul_(settings.tau).add_(self.q.vector, alpha=1 - settings.tau)
        losses = loss_policy, loss_q, loss_alpha
        described = *losses, alpha, -now.log_prob.mean(), values.mean(), targets.mean(), policy_norm, q_norm
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))

    def state(self) -> LearnerState:
        self._counters.updates += 1
        (log_alpha,) = self._log_alpha.copies().values()
        policy, q, targets = (flat.copies() for flat in (self.policy, self.q, self._targets))
        optimizers = {name: descent.state for name, descent in self._descent.items()}
        return SACArrays(policy, q, targets, log_alpha, optimizers).state(self._counters)


class SACLearner(OffPolicyLearner[object, Array]):
    """SAC for one run; see Learner."""

    metrics: ClassVar[tuple[str, ...]] = METRICS

    def __init__(self, settings: SAC, setup: Setup) -> None:
        super().__init__(settings.name, setup, discrete=False)
        self.settings: SAC = settings
        self._lr_factor = lr_factor(settings, settings.learning_rate)
        policy = setup.policy.network_spec(setup, 2 * setup.action_size, activation="relu")
        critic = setup.policy.critic(settings.critic_hidden_sizes)
        q = critic.network_spec(setup, 1, extra_size=setup.action_size, activation="relu")
        self.policy: Network = build_network(POLICY_NETWORK, policy)
        self.q: Network = build_network(TWINS[0], q)
        self.kernel: Kernel = self.choose_kernel(settings.kernel, settings.optimizer, self.policy, self.q)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return two Q-functions that differ, and targets equal to them; see Learner."""
        rng = generator(run_seed, "initialize")
        policy = self.policy.initialize(rng)
        first, second = (self.q.initialize(rng) for _ in TWINS)
        q = first | {f"{TWINS[1]}{name.removeprefix(TWINS[0])}": value for name, value in second.items()}
        log_alpha = np.array(np.log(self.settings.ent_coeff_init), np.float32)
        trained = {"policy": policy, "q": q, "alpha": {"log_alpha": log_alpha}}
        optimizers = {name: initial_state(self.settings.optimizer, trained[name]) for name in TRAINED}
        targets = {name: value.copy() for name, value in q.items()}
        return SACArrays(policy, q, targets, log_alpha, optimizers).state(Counters(0, 0))

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[Array]:
        of = (self.settings, self.policy, self.q, state)
        discount, rate = self._setup.processing.discount, self._learning_rate(state)
        if self.kernel.name == "fused":
            return fused(SACDefinition)(*of, discount=discount, learning_rate=rate, parallel=parallel)
        return SACDefinition(*of, discount=discount, learning_rate=rate, device=self._device)

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Array:
        """Draw [2n, A]; see SACDefinition.step."""
        return rng.standard_normal((2 * minibatch.transitions.rewards.size, self._setup.action_size), np.float32)

    def networks_of(self, state: LearnerState) -> dict[str, Params]:
        arrays = SACArrays.of(state)
        return {"the policy": arrays.policy, "the Q-functions": arrays.q}

    def described(self, state: LearnerState) -> Metrics:
        return {"learning_rate": self._learning_rate(state)}

    def _learning_rate(self, state: LearnerState) -> float:
        return self.settings.learning_rate * self._lr_factor(Counters.of(state).updates)
