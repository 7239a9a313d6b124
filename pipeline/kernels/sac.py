"""SAC's gradient steps with hand-written derivatives; algorithms/off_policy/sac.py has the equations."""

import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from metaloom.pipeline.algorithms.off_policy.learner import FusedGradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.sac import LAYOUT, METRICS, TWINS
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.nn.distributions import LOG_2PI
from metaloom.pipeline.nn.flat_networks import ALL, FlatNetwork, FlatParams
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.actors.off_policy import MAX_LOG_STD, MIN_LOG_STD
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap

_LOG_2 = math.log(2)


class TanhGaussianActions:
    """Sampled actions tanh(u), with Gaussian u, for n rows of network outputs, and their reparameterized gradients.

    Haarnoja et al. 2018, arXiv:1801.01290, appendix C. All arrays have the precision of the outputs and the shape
    [n, A], except log_prob, [n], the joint log-densities of the actions.
    """

    def __init__(self, outputs: Array, noise: Array) -> None:
        """Sample actions from outputs [n, 2A] (means, then log standard deviations) and normal noise [n, A]."""
        A, noise = noise.shape[1], noise.astype(outputs.dtype, copy=False)
        self.mean: Array = outputs[:, :A]
        raw = outputs[:, A:]
        self.log_std: Array = np.clip(raw, MIN_LOG_STD, MAX_LOG_STD)
        self.inside: Array = self.log_std == raw  # False where log_std was clamped
        self.deviation: Array = np.exp(self.log_std) * noise
        self.u: Array = (u := self.mean + self.deviation)
        self.actions: Array = np.tanh(u)
        # Exact, unlike log(1 - a² + 1e-6) in the paper's code, which is inaccurate for |u| > 6.
        log_slope = 2 * (_LOG_2 - u - np.logaddexp(np.float32(0), -2 * u))
        terms = -0.5 * np.square(noise) - self.log_std - log_slope
        self.log_prob: Array = terms.sum(axis=1) - outputs.dtype.type(0.5 * A * LOG_2PI)

    def backward(self, action_gradient: Array, log_prob_gradient: Array | float) -> Array:
        """Return the gradient of a loss with respect to the outputs, [n, 2A], with the noise held fixed.

        The arguments are the loss's gradients with respect to the actions, [n, A], and log-densities, [n, 1] or scalar.
        """
        to_mean = action_gradient * (1 - np.square(self.actions))
        to_mean += 2 * log_prob_gradient * self.actions
        to_log_std = to_mean * self.deviation
        to_log_std -= log_prob_gradient
        to_log_std *= self.inside
        return np.concatenate([to_mean, to_log_std], axis=1)


class TwinQKernel(FlatParams):
    """Two Q-functions with their parameters in one vector. Fujimoto et al. 2018, arXiv:1802.09477, section 4.2."""

    def __init__(self, params: Mapping[str, Array], spec: NetworkSpec, *, parallel: ParallelMap = map) -> None:
        """Copy parameters q1.* and q2.*; `parallel` maps over the two networks."""
        super().__init__(params)
        self._networks = [FlatNetwork.of(name, spec, self) for name in TWINS]
        self._parallel = parallel

    def values(self, observations: Array, actions: Array) -> Array:
        """Return the Q-values [2, n] of observations [n, O] and actions [n, A]. Gradients are later taken there."""
        inputs = np.concatenate([observations, actions], axis=1)
        return np.stack(list(self._parallel(lambda network: network.forward(inputs)[:, 0], self._networks)))

    def backward(self, value_gradient: Array) -> None:
        """Write the gradient of a loss to `gradient`, given its gradient with respect to the values, [2, n]."""
        list(self._parallel(lambda network, slopes: network.backward(slopes[:, None]), self._networks, value_gradient))

    def gradient_of_smaller(self, values: Array, columns: slice = ALL) -> Array:
        """Return the gradient of each row's smaller value with respect to the given input columns, [n, columns]."""
        first = values[0] <= values[1]
        by_network = [np.nonzero(first)[0], np.nonzero(~first)[0]]

        def work(network: FlatNetwork, rows: Array) -> Array:
            return network.input_gradient(np.ones((len(rows), 1), values.dtype), columns, rows)

        parts = list(self._parallel(work, self._networks, by_network))
        gradient = np.empty((values.shape[1], parts[0].shape[1]), values.dtype)
        for rows, part in zip(by_network, parts, strict=True):
            gradient[rows] = part
        return gradient


class SACKernel(FusedGradientSteps[Array]):
    """SAC's fused gradient steps, on working copies of the networks and the temperature."""

    layout = LAYOUT
    _settings: SAC

    def copied(self, name: str, state: LearnerState) -> FlatParams:
        """Return a working copy of a part of a state, with both Q-functions in one vector."""
        if name not in ("q", "targets"):
            return super().copied(name, state)
        return TwinQKernel(LAYOUT[name].of(state), self._networks[1].spec, parallel=self._parallel)

    def prepare(self) -> None:
        self._policy, self._log_alpha = self.copies["policy"], self.copies["alpha"]
        self._q, self._targets = (cast(TwinQKernel, self.copies[name]) for name in ("q", "targets"))
        policy = self._networks[0]
        self._network = FlatNetwork.of(policy.prefix, policy.spec, self._policy)

    def step(self, minibatch: Minibatch, noise: Array) -> Metrics:
        batch = merged(minibatch)
        n = len(batch.rewards)
        outputs = self._network.forward(np.concatenate([batch.observations, batch.next_observations]))
        now = TanhGaussianActions(outputs[:n], noise[:n])
        following = TanhGaussianActions(outputs[n:], noise[n:])

        settings, rates = self._settings, self._rates
        excess = float(now.log_prob.mean()) - now.actions.shape[1]
        temperature_loss = -float(self._log_alpha.vector[0]) * excess
        if settings.learn_ent_coeff:
            self._log_alpha.gradient[:] = -excess
            self._log_alpha.step(rates["alpha"])
        alpha = float(np.exp(self._log_alpha.vector[0]))

        rewards = batch.rewards.astype(self._policy.vector.dtype, copy=False)
        if settings.standardize_rew:
            rewards = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        next_values = self._targets.values(batch.next_observations, following.actions).min(axis=0)
        next_values -= alpha * following.log_prob
        targets = settings.rew_scale * rewards + self._discount * (~batch.terminated * next_values)

        values = self._q.values(batch.observations, batch.actions)
        errors = values - targets
        self._q.backward(errors / np.float32(n))
        q_norm = self._q.clip_gradient(settings.max_grad_norm)
        self._q.step(rates["q"])

        acting_values = self._q.values(batch.observations, now.actions)
        slopes = self._q.gradient_of_smaller(acting_values, slice(batch.observations.shape[1], None))
        slopes /= np.float32(-n)
        self._network.backward(now.backward(slopes, alpha / n), slice(0, n))
        policy_norm = self._policy.clip_gradient(settings.max_grad_norm)
        self._policy.step(rates["policy"])

        if self.counts_to(settings.target_update_intvl):
            target_vector = self._targets.vector
            target_vector *= settings.tau
            target_vector += (1 - settings.tau) * self._q.vector
        log_prob, q_loss = float(now.log_prob.mean()), float(np.square(errors).mean())
        losses = alpha * log_prob - float(acting_values.min(axis=0).mean()), q_loss, temperature_loss
        described = *losses, alpha, -log_prob, float(values.mean()), float(targets.mean()), policy_norm, q_norm
        return dict(zip(METRICS, described, strict=True))
