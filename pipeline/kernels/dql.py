"""DQL's gradient steps with hand-written derivatives; algorithms/off_policy/dql.py has the equations."""

import numpy as np

from metaloom.pipeline.algorithms.off_policy.dql import LAYOUT, METRICS
from metaloom.pipeline.algorithms.off_policy.learner import FusedGradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.flat_networks import FlatNetwork
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.types import Array, Metrics, Minibatch


class DQLKernel(FusedGradientSteps[None]):
    """DQL's fused gradient steps, on working copies of the Q-function and its target network."""

    layout = LAYOUT
    _settings: DQL
    _networks: Network

    def prepare(self) -> None:
        self._q, self._target = self.copies["q"], self.copies["target"]
        self._network, self._target_network = (
            FlatNetwork.of(self._networks.prefix, self._networks.spec, flat) for flat in (self._q, self._target)
        )

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
        norm = self._q.clip_gradient(self._settings.max_grad_norm)
        self._q.step(self._rates["q"])
        if self.counts_to(self._settings.target_update_intvl):
            self._target.vector[:] = self._q.vector
        return dict(zip(METRICS, (loss, float(chosen.mean()), float(targets.mean()), norm), strict=True))


def huber_loss(errors: Array) -> tuple[float, Array]:
    """Return the mean Huber loss, e² / 2 for |e| < 1 and |e| - ½ otherwise, and its gradient, [n]. Huber 1964."""
    clipped = np.clip(errors, -1, 1)
    return float((clipped * (errors - 0.5 * clipped)).mean()), clipped / np.float32(len(errors))
