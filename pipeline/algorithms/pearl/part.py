"""The gradients of a gradient step on some of its tasks, in buffers that are used again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from metaloom.pipeline.algorithms.off_policy.tanh_gaussian import TanhGaussianSample
from metaloom.pipeline.algorithms.pearl.networks import Activations, Network
from metaloom.pipeline.algorithms.pearl.posterior import Belief, posterior_for
from metaloom.pipeline.algorithms.pearl.regularization import Regularization
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.algorithms.pearl.state import TRAINED
from metaloom.pipeline.types import Array, Metrics, Minibatch, Transitions


@dataclass(frozen=True)
class Noise:
    """Standard normal noise of one gradient step.

    Attributes:
        latent: [K, Z], of the latent variables.
        actions: [K, N, A], of the policy's actions.
    """

    latent: Array
    actions: Array


class Part:
    """Gradients on some of the K tasks of a minibatch, as their share of the whole minibatch's.

    First `critic_gradients`, then `actor_gradients` with the Q functions that learned from the first.

    Attributes:
        gradients: by network, [D].
    """

    def __init__(
        self, settings: PEARL, discount: float, networks: Mapping[str, Network], minibatch: Minibatch, tasks: slice
    ) -> None:
        assert minibatch.context is not None
        self._settings, self._discount, self._tasks = settings, discount, tasks
        self._regularization = Regularization(
            settings.policy_mean_reg, settings.policy_std_reg, settings.policy_pre_activation_reg
        )
        self._networks = networks
        K, self._num_rows = minibatch.transitions.rewards.shape
        self._total_rows = K * self._num_rows
        self._posterior = posterior_for(settings.use_information_bottleneck)
        self.gradients = {name: np.zeros_like(networks[name].vector) for name in TRAINED}
        self._layers = {name: networks[name].views(self.gradients[name]) for name in TRAINED}

        num_tasks = tasks.stop - tasks.start
        dtype = networks["policy"].vector.dtype
        rows = num_tasks * self._num_rows
        self._encoder = Activations(networks["encoder"].sizes, num_tasks * minibatch.context.rewards.shape[1], dtype)
        self._policy = Activations(networks["policy"].sizes, rows, dtype)
        self._qs = {name: Activations(networks[name].sizes, rows, dtype) for name in ("q1", "q2")}
        self._v = Activations(networks["v"].sizes, rows, dtype)
        self._z = np.empty((rows, settings.latent_size), dtype)
        state_size, q_size = networks["v"].sizes[0], networks["q1"].sizes[0]
        self._action_columns = slice(state_size - settings.latent_size, q_size - settings.latent_size)
        self._latent_columns = slice(q_size - settings.latent_size, q_size)

    def critic_gradients(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        """Of the encoder and the Q functions, from the loss Σ mean (Q - y)² + kl_weight · Σ KL.

        y = reward_scale · r + (1 - terminated) · discount · target V(o', z). Rakelly et al. 2019, eq. 3.

        Returns:
            Sums over this part's rows, and of kl and latent_std over its tasks.
        """
        assert minibatch.context is not None
        belief = self._infer(minibatch.context, noise.latent[self._tasks])
        batch = minibatch.transitions
        targets = self._targets(batch)
        latent_errors = np.zeros_like(belief.mean)
        loss = 0.0
        for name in self._qs:
            errors = self._q(name, batch, self._rows(batch.actions)) - targets
            loss += _sum_of_squares(errors)
            latent_errors += self._q_backward(name, errors * (2 / self._total_rows))
        encoder_errors = self._posterior.backward(latent_errors, noise.latent[self._tasks], self._settings.kl_weight)
        self._encoder.backward(
            self._networks["encoder"].layers,
            encoder_errors.reshape(self._encoder.outputs.shape),
            self._layers["encoder"],
        )
        return {
            "q_loss": loss,
            "q_target": float(targets.sum(dtype=np.float64)),
            "kl": float(self._posterior.kl().sum(dtype=np.float64)),
            "latent_std": float(np.sqrt(belief.variance).mean(-1).sum(dtype=np.float64)),
        }

    def actor_gradients(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        """Of V and the policy, given the latent variables of `critic_gradients`, to which none flows.

        V: mean (V(o, z) - (min Q(o, a, z) - log π(a|o, z)))² with new actions a of the policy. Policy: mean (log π -
        min Q) and the regularization. Rakelly et al. 2019, eq. 4, with V as in Haarnoja et al. 2018, eq. 5.

        Returns:
            Sums over this part's rows.
        """
        batch = minibatch.transitions
        np.concatenate([self._rows(batch.observations), self._z], axis=-1, out=self._policy.inputs)
        outputs = self._policy.forward(self._networks["policy"].layers)
        action_noise = self._rows(noise.actions)
        acting = TanhGaussianSample(outputs, action_noise)
        values = {name: self._q(name, batch, acting.actions) for name in self._qs}
        lowest = reduce(np.minimum, values.values())

        errors = self._state_value("v", batch.observations) - (lowest - acting.log_prob)
        self._v.backward(self._networks["v"].layers, errors[:, None] * (2 / self._total_rows), self._layers["v"])

        penalty, output_errors = self._regularization.penalty(acting, outputs, action_noise)
        output_errors += acting.backward(-self._action_slopes(values), 1.0)
        output_errors *= 1 / self._total_rows
        self._policy.backward(self._networks["policy"].layers, output_errors, self._layers["policy"])
        log_prob = float(acting.log_prob.sum(dtype=np.float64))
        return {
            "value_loss": _sum_of_squares(errors),
            "policy_loss": log_prob - float(lowest.sum(dtype=np.float64)) + penalty,
            "entropy": -log_prob,
        }

    def _infer(self, context: Transitions, noise: Array) -> Belief:
        """Put latent variables in place that are drawn from what the context says of the tasks."""
        features = context_features(context, self._tasks, with_next=self._settings.use_next_obs_in_context)
        np.concatenate(features, axis=-1, out=self._encoder.inputs)
        outputs = self._encoder.forward(self._networks["encoder"].layers)
        num_tasks = len(noise)
        belief = self._posterior.infer(outputs.reshape(num_tasks, -1, outputs.shape[1]))
        self._z.reshape(num_tasks, self._num_rows, -1)[:] = belief.sample(noise)[:, None]
        return belief

    def _targets(self, batch: Transitions) -> Array:
        continuing = (self._discount * ~self._rows(batch.terminated)).astype(self._z.dtype)
        next_values = self._state_value("target_v", batch.next_observations)
        return self._settings.reward_scale * self._rows(batch.rewards) + continuing * next_values

    def _state_value(self, name: str, observations: Array) -> Array:
        np.concatenate([self._rows(observations), self._z], axis=-1, out=self._v.inputs)
        return self._v.forward(self._networks[name].layers)[:, 0]

    def _q(self, name: str, batch: Transitions, actions: Array) -> Array:
        q = self._qs[name]
        np.concatenate([self._rows(batch.observations), actions, self._z], axis=-1, out=q.inputs)
        return q.forward(self._networks[name].layers)[:, 0]

    def _q_backward(self, name: str, errors: Array) -> Array:
        """Write a Q function's gradient; returns the latent variables', [k, Z]."""
        q, layers = self._qs[name], self._networks[name].layers
        q.backward(layers, errors[:, None], self._layers[name])
        by_row = q.input_errors(layers, self._latent_columns)
        return by_row.reshape(-1, self._num_rows, by_row.shape[1]).sum(1)

    def _action_slopes(self, values: Mapping[str, Array]) -> Array:
        """Derivatives of the lower Q value of every row with respect to its action, [n, A]."""
        first_is_lower = values["q1"] <= values["q2"]
        slopes = np.empty((len(first_is_lower), self._action_columns.stop - self._action_columns.start), self._z.dtype)
        for name, lower in (("q1", first_is_lower), ("q2", ~first_is_lower)):
            rows = lower.nonzero()[0]
            slopes[rows] = self._qs[name].slopes(self._networks[name].layers, rows, self._action_columns)
        return slopes

    def _rows(self, values: Array) -> Array:
        """This part of values [K, N, ...], as rows [n, ...]."""
        return values[self._tasks].reshape(-1, *values.shape[2:])


def context_features(context: Transitions, tasks: slice, *, with_next: bool) -> Sequence[Array]:
    """What the encoder sees of the context of some tasks, to be joined along the last axis: [rows, ...] each."""
    features = [context.observations, context.actions, context.rewards[..., None]]
    if with_next:
        features.append(context.next_observations)
    return [feature[tasks].reshape(-1, feature.shape[-1]) for feature in features]


def _sum_of_squares(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())
