"""DQL's gradient steps for plain networks on the CPU, from hand-written derivatives.

It computes what `DQLDefinition` in pipeline/algorithms/off_policy/dql.py does; the equations are there.
"""

from __future__ import annotations

import numpy as np

from metaloom.pipeline.algorithms.off_policy.dql import TARGET, Q
from metaloom.pipeline.algorithms.off_policy.learner import Counters, GradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.flat_networks import FlatDescent, FlatNetwork, FlatParams, prefixed, unprefixed
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch


class DQLKernel(GradientSteps[None]):
    """Working copies of Q-function and target network during an iteration."""

    def __init__(
        self, settings: DQL, network: Network, state: LearnerState, *, discount: float, learning_rate: float
    ) -> None:
        self._settings, self._discount, self._learning_rate = settings, discount, learning_rate
        self._counters = Counters.of(state)
        self.q: FlatParams = FlatParams(state.params)
        self._network = FlatNetwork.of(network.prefix, network.spec, self.q)
        self._target = FlatParams(prefixed(unprefixed(state.extra, TARGET), TARGET))
        self._target_network = FlatNetwork.of(TARGET, network.spec, self._target)
        self._descent = FlatDescent(settings.optimizer.name, self.q, unprefixed(state.optimizer, Q))

    def step(self, minibatch: Minibatch, noise: None = None) -> Metrics:
        batch = merged(minibatch)
        rows = np.arange(len(batch.rewards))
        following = self._target_network.forward(batch.next_observations).max(axis=1)
        rewards = batch.rewards.astype(following.dtype, copy=False)
        targets = rewards + self._discount * (~batch.terminated * following)
        values = self._network.forward(batch.observations)
        chosen = values[rows, batch.actions]
        loss, slopes = huber_loss(chosen - targets)
        gradient = np.zeros_like(values)
        gradient[rows, batch.actions] = slopes
        self._network.backward(gradient)
        norm = self.q.clip_gradient(self._settings.max_grad_norm)
        self._descent.step(self._learning_rate)
        self._counters.gradient_steps += 1
        if self._counters.gradient_steps % self._settings.target_update_intvl == 0:
            self._target.vector[:] = self.q.vector
        return {
            "q_loss": loss,
            "q_mean": float(chosen.mean()),
            "target_mean": float(targets.mean()),
            "gradient_norm": norm,
        }

    def state(self) -> LearnerState:
        self._counters.updates += 1
        return LearnerState(
            self.q.copies(), prefixed(self._descent.state, Q), self._target.copies() | self._counters.arrays()
        )


def huber_loss(errors: Array) -> tuple[float, Array]:
    """Return the mean of e² / 2 where |e| < 1 and |e| - ½ elsewhere, and its derivatives, [n]. Huber 1964."""
    clipped = np.clip(errors, -1, 1)
    return float((clipped * (errors - 0.5 * clipped)).mean()), clipped / np.float32(len(errors))
