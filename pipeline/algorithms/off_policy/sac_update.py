"""The gradient steps of one iteration of SAC, on working copies of a learner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from metaloom.pipeline.algorithms.off_policy import progress
from metaloom.pipeline.algorithms.off_policy.tanh_gaussian import TanhGaussianSample
from metaloom.pipeline.algorithms.off_policy.twin_q import NAMES, TwinQ
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.kernels.flat_networks import FlatParams, Network, layer_paths, prefixed, unprefixed
from metaloom.pipeline.nn.optimizers import AdamInPlace
from metaloom.pipeline.policies.actors.tanh_gaussian import POLICY_NETWORK
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Params, Transitions

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.off_policy.sac import SAC

POLICY, Q, ENT_COEFF = "policy", "q", "alpha"
"""Prefixes of the optimizers' states."""


class SACUpdate:
    """Policy, Q-functions, targets and temperature while an iteration changes them.

    Attributes:
        policy: the policy's parameters.
        q: the Q-functions.
        learning_rate: of this iteration.
    """

    METRICS: ClassVar[tuple[str, ...]] = (
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
    """What describes a gradient step."""

    def __init__(
        self,
        settings: SAC,
        policy: OffPolicyPolicy,
        learner: LearnerState,
        discount: float,
        rng: np.random.Generator,
        *,
        parallel: ParallelMap = map,
    ) -> None:
        self._settings, self._discount, self._rng = settings, discount, rng
        self._observation_size, self._action_size = policy.observation_size, policy.action_size
        self._num_updates = progress.num_updates(learner)
        self._num_steps = progress.num_gradient_steps(learner)
        self.learning_rate = settings.learning_rate * settings.lr_factor(self._num_updates)

        self.policy = FlatParams(learner.params)
        self._network = Network(self.policy, layer_paths(POLICY_NETWORK, len(policy.config.hidden_sizes)), "relu")
        num_hidden = len(settings.critic_hidden_sizes)
        q, targets = _twins(learner.extra, ""), _twins(learner.extra, "target_")
        self.q = TwinQ(q, num_hidden, parallel=parallel)
        self._targets = TwinQ(targets, num_hidden, parallel=parallel)
        self._log_alpha = learner.extra["log_alpha"].reshape(1).copy()

        self._policy_optimizer = AdamInPlace.of(unprefixed(learner.optimizer, POLICY))
        self._q_optimizer = AdamInPlace.of(unprefixed(learner.optimizer, Q))
        self._alpha_optimizer = AdamInPlace.of(unprefixed(learner.optimizer, ENT_COEFF))

    def step(self, batch: Transitions) -> Metrics:
        """One gradient step of everything on N transitions."""
        n = len(batch.rewards)
        noise = self._rng.standard_normal((2 * n, self._action_size), np.float32)
        outputs = self._network.forward(np.concatenate([batch.observations, batch.next_observations]))
        now = TanhGaussianSample(outputs[:n], noise[:n])
        following = TanhGaussianSample(outputs[n:], noise[n:])

        described = self._step_temperature(now)
        described |= self._step_q(batch, self._goals(batch, following))
        described |= self._step_policy(batch.observations, now)
        self._num_steps += 1
        if self._num_steps % self._settings.target_update_intvl == 0:
            self._move_targets()
        return described

    def learner(self) -> LearnerState:
        """The learner after these gradient steps."""
        return LearnerState(
            self.policy.copies(),
            prefixed(self._policy_optimizer.state, POLICY)
            | prefixed(self._q_optimizer.state, Q)
            | prefixed(self._alpha_optimizer.state, ENT_COEFF),
            {
                **self.q.flat.copies(),
                **{f"target_{name}": value for name, value in self._targets.flat.copies().items()},
                "log_alpha": self._log_alpha.reshape(()).copy(),
                **progress.counters(self._num_updates + 1, self._num_steps),
            },
        )

    @property
    def _alpha(self) -> float:
        return float(np.exp(self._log_alpha[0]))

    def _step_temperature(self, sample: TanhGaussianSample) -> Metrics:
        """Descend -mean(log α (log π + H̄)), with H̄ = -A the entropy that is aimed at."""
        excess = float(sample.log_prob.mean()) - self._action_size
        loss = -float(self._log_alpha[0]) * excess
        if self._settings.learn_ent_coeff:
            self._alpha_optimizer.step(self._log_alpha, np.array([-excess], np.float32), self.learning_rate)
        return {"temperature_loss": loss, "temperature": self._alpha, "entropy": -float(sample.log_prob.mean())}

    def _goals(self, batch: Transitions, following: TanhGaussianSample) -> Array:
        """What Q is to be, [n]: r + γ (1 - terminated) (min Q̄(o', a') - α log π(a'|o'))."""
        rewards = batch.rewards
        if self._settings.standardize_rew:
            rewards = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        values = self._targets.values(_joined(batch.next_observations, following.actions)).min(axis=0)
        values -= self._alpha * following.log_prob
        return self._settings.rew_scale * rewards + self._discount * (~batch.terminated * values)

    def _step_q(self, batch: Transitions, goals: Array) -> Metrics:
        """Descend the average of both mean squared errors."""
        values = self.q.values(_joined(batch.observations, batch.actions))
        errors = values - goals
        self.q.backward(errors / np.float32(len(goals)))
        norm = self.q.flat.clip_gradient(self._settings.max_grad_norm)
        self._q_optimizer.step(self.q.flat.vector, self.q.flat.gradient, self.learning_rate)
        return {
            "q_loss": float(np.square(errors).mean()),
            "q_mean": float(values.mean()),
            "target_mean": float(goals.mean()),
            "q_gradient_norm": norm,
        }

    def _step_policy(self, observations: Array, sample: TanhGaussianSample) -> Metrics:
        """Descend mean(α log π(a|o) - min Q(o, a)) with the Q-functions as they are by now."""
        n = len(observations)
        values = self.q.values(_joined(observations, sample.actions))
        slopes = self.q.gradient_of_smaller(values, slice(self._observation_size, None))
        slopes /= np.float32(-n)
        self._network.backward(sample.backward(slopes, self._alpha / n), slice(0, n))
        norm = self.policy.clip_gradient(self._settings.max_grad_norm)
        self._policy_optimizer.step(self.policy.vector, self.policy.gradient, self.learning_rate)
        loss = self._alpha * float(sample.log_prob.mean()) - float(values.min(axis=0).mean())
        return {"policy_loss": loss, "gradient_norm": norm}

    def _move_targets(self) -> None:
        """Q̄ = τ Q̄ + (1 - τ) Q."""
        tau, targets = self._settings.tau, self._targets.flat.vector
        targets *= tau
        targets += (1 - tau) * self.q.flat.vector


def _joined(observations: Array, actions: Array) -> Array:
    return np.concatenate([observations, actions], axis=1)


def _twins(extra: Params, before: str) -> Params:
    """q1.* and q2.* from those whose names have `before` before them."""
    return {
        name.removeprefix(before): value
        for name, value in extra.items()
        if name.startswith(tuple(f"{before}{twin}." for twin in NAMES))
    }
