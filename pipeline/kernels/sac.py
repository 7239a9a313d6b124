"""SAC's gradient steps for plain networks on the CPU, from hand-written derivatives.

It computes what `SACDefinition` in pipeline/algorithms/off_policy/sac.py does; the equations are there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.algorithms.off_policy.learner import Counters, GradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.sac import TWINS, SACArrays
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.kernels.tanh_gaussian import TanhGaussianActions
from metaloom.pipeline.nn.flat_networks import ALL, FlatDescent, FlatNetwork, FlatParams
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap


class TwinQKernel:
    """Two Q-functions, whose parameters are one vector. The smaller value counts.

    Fujimoto et al. 2018, arXiv:1802.09477, section 4.2.
    """

    def __init__(self, params: Mapping[str, Array], spec: NetworkSpec, *, parallel: ParallelMap = map) -> None:
        """Copy parameters q1.* and q2.*; `parallel` maps over the two networks."""
        self.flat: FlatParams = FlatParams(params)
        self._networks = [FlatNetwork.of(name, spec, self.flat) for name in TWINS]
        self._parallel = parallel

    def values(self, observations: Array, actions: Array) -> Array:
        """Return values [2, n] of observations [n, O] and actions [n, A]; the next derivatives are about them."""
        inputs = np.concatenate([observations, actions], axis=1)

        def work(network: FlatNetwork) -> Array:
            return network.forward(inputs)[:, 0]

        return np.stack(list(self._parallel(work, self._networks)))

    def backward(self, value_gradient: Array) -> None:
        """Write the gradient with respect to the parameters of a loss from that to the values, [2, n]."""

        def work(network: FlatNetwork, slopes: Array) -> None:
            network.backward(slopes[:, None])

        list(self._parallel(work, self._networks, value_gradient))

    def gradient_of_smaller(self, values: Array, columns: slice = ALL) -> Array:
        """Return the gradient of every row's smaller value, as `values` gave it last, in its inputs, [n, columns]."""
        first = values[0] <= values[1]
        by_network = [np.nonzero(first)[0], np.nonzero(~first)[0]]

        def work(network: FlatNetwork, rows: Array) -> Array:
            return network.input_gradient(np.ones((len(rows), 1), values.dtype), columns, rows)

        parts = list(self._parallel(work, self._networks, by_network))
        gradient = np.empty((values.shape[1], parts[0].shape[1]), values.dtype)
        for rows, part in zip(by_network, parts, strict=True):
            gradient[rows] = part
        return gradient


class SACKernel(GradientSteps[Array]):
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
        parallel: ParallelMap = map,
    ) -> None:
        self._settings, self._discount, self._learning_rate = settings, discount, learning_rate
        self._counters = Counters.of(state)
        arrays = SACArrays.of(state)
        self.policy: FlatParams = FlatParams(arrays.policy)
        self._network = FlatNetwork.of(policy.prefix, policy.spec, self.policy)
        self.q: TwinQKernel = TwinQKernel(arrays.q, q.spec, parallel=parallel)
        self._targets = TwinQKernel(arrays.targets, q.spec, parallel=parallel)
        self._log_alpha = FlatParams({"log_alpha": arrays.log_alpha})
        trained = {"policy": self.policy, "q": self.q.flat, "alpha": self._log_alpha}
        self._descent = {
            name: FlatDescent(settings.optimizer.name, trained[name], kept) for name, kept in arrays.optimizers.items()
        }

    def step(self, minibatch: Minibatch, noise: Array) -> Metrics:
        batch = merged(minibatch)
        n = len(batch.rewards)
        outputs = self._network.forward(np.concatenate([batch.observations, batch.next_observations]))
        now = TanhGaussianActions(outputs[:n], noise[:n])
        following = TanhGaussianActions(outputs[n:], noise[n:])

        settings, rate = self._settings, self._learning_rate
        excess = float(now.log_prob.mean()) - now.actions.shape[1]
        temperature_loss = -float(self._log_alpha.vector[0]) * excess
        if settings.learn_ent_coeff:
            self._log_alpha.gradient[:] = -excess
            self._descent["alpha"].step(rate)
        alpha = float(np.exp(self._log_alpha.vector[0]))

        rewards = batch.rewards.astype(self.policy.vector.dtype, copy=False)
        if settings.standardize_rew:
            rewards = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        next_values = self._targets.values(batch.next_observations, following.actions).min(axis=0)
        next_values -= alpha * following.log_prob
        targets = settings.rew_scale * rewards + self._discount * (~batch.terminated * next_values)

        values = self.q.values(batch.observations, batch.actions)
        errors = values - targets
        self.q.backward(errors / np.float32(n))
        q_norm = self.q.flat.clip_gradient(settings.max_grad_norm)
        self._descent["q"].step(rate)

        acting_values = self.q.values(batch.observations, now.actions)
        slopes = self.q.gradient_of_smaller(acting_values, slice(batch.observations.shape[1], None))
        slopes /= np.float32(-n)
        self._network.backward(now.backward(slopes, alpha / n), slice(0, n))
        policy_norm = self.policy.clip_gradient(settings.max_grad_norm)
        self._descent["policy"].step(rate)

        self._counters.gradient_steps += 1
        if self._counters.gradient_steps % settings.target_update_intvl == 0:
            target_vector = self._targets.flat.vector
            target_vector *= settings.tau
            target_vector += (1 - settings.tau) * self.q.flat.vector
        return {
            "temperature_loss": temperature_loss,
            "temperature": alpha,
            "entropy": -float(now.log_prob.mean()),
            "q_loss": float(np.square(errors).mean()),
            "q_mean": float(values.mean()),
            "target_mean": float(targets.mean()),
            "q_gradient_norm": q_norm,
            "policy_loss": alpha * float(now.log_prob.mean()) - float(acting_values.min(axis=0).mean()),
            "gradient_norm": policy_norm,
        }

    def state(self) -> LearnerState:
        self._counters.updates += 1
        (log_alpha,) = self._log_alpha.copies().values()
        policy, q, targets = (flat.copies() for flat in (self.policy, self.q.flat, self._targets.flat))
        optimizers = {name: descent.state for name, descent in self._descent.items()}
        return SACArrays(policy, q, targets, log_alpha, optimizers).state(self._counters)
