"""PEARL's gradient steps with hand-written derivatives.

A step's tasks are split into fixed parts that threads compute in parallel. Parts are summed in a fixed order, so
results are bitwise identical for any number of threads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import numpy as np

from metaloom.pipeline.algorithms.off_policy.learner import FusedGradientSteps
from metaloom.pipeline.algorithms.pearl.learner import ADAM_EPSILON, LAYOUT, MIN_VARIANCE, TWINS, Noise, PEARLNetworks
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.kernels.sac import TanhGaussianActions
from metaloom.pipeline.nn.flat_networks import FlatNetwork, FlatParams
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.types import Array, Metrics, Minibatch, Params, Transitions

MAX_PARTS = 4
"""Maximum number of parts into which a step's tasks are split. It is fixed because the order of sums depends on it."""


@dataclass(frozen=True)
class PosteriorArrays:
    """Diagonal Gaussian posteriors over the latent variables of K tasks."""

    mean: Array  # [K, Z]
    variance: Array  # 0 for point estimates, [K, Z]

    def sample(self, noise: Array) -> Array:
        """Return latent variables [K, Z] sampled with standard normal noise [K, Z]."""
        return self.mean + np.sqrt(self.variance) * noise


class GaussianProduct:
    """Posterior q(z|c) ∝ ∏ N(z; μ_n, σ²_n), with one factor per transition.

    Rakelly et al. 2019, arXiv:1903.08254, eq. 2. The first half of the encoder's 2Z outputs are μ_n; softplus of the
    second half, at least 1e-7, is σ²_n. The product is the Gaussian with 1/σ² = Σ 1/σ²_n and μ = σ² Σ μ_n/σ²_n. The
    prior is N(0, I).
    """

    def infer(self, outputs: Array) -> PosteriorArrays:
        """Infer the posterior from the encoder's outputs [K, C, 2Z]; the other methods use the latest posterior."""
        self._means, self._raw = np.split(outputs, 2, axis=-1)
        self._variances = np.logaddexp(0, self._raw)
        self._precisions = 1 / np.maximum(self._variances, MIN_VARIANCE)
        variance = 1 / self._precisions.sum(1)
        self._posterior = PosteriorArrays(variance * (self._means * self._precisions).sum(1), variance)
        return self._posterior

    def kl(self) -> Array:
        """Return KL(posterior ‖ prior) for each task in nats, [K]: ½ Σ (σ² + μ² - 1 - log σ²)."""
        mean, variance = self._posterior.mean, self._posterior.variance
        return 0.5 * (variance + np.square(mean) - 1 - np.log(variance)).sum(-1)

    def backward(self, latent_errors: Array, noise: Array, kl_weight: float) -> Array:
        """Return the gradient of a loss + kl_weight · Σ KL with respect to the encoder's outputs, [K, C, 2Z].

        `latent_errors` is the loss's gradient with respect to the latent variables sampled with `noise`, [K, Z] each.
        """
        mean, variance = self._posterior.mean, self._posterior.variance
        by_mean = latent_errors + kl_weight * mean
        by_variance = 0.5 * latent_errors * noise / np.sqrt(variance) + 0.5 * kl_weight * (1 - 1 / variance)
        # ∂μ/∂(1/σ²_n) = σ² (μ_n - μ) and ∂σ²/∂(1/σ²_n) = -σ⁴.
        by_precision = (by_mean * variance)[:, None] * (self._means - mean[:, None])
        by_precision -= (by_variance * np.square(variance))[:, None]
        # The derivative of softplus(x) is 1 - exp(-softplus(x)).
        slopes = -np.square(self._precisions) * -np.expm1(-self._variances) * (self._variances >= MIN_VARIANCE)
        by_means = (by_mean * variance)[:, None] * self._precisions
        return np.concatenate([by_means, by_precision * slopes], axis=-1)


class Point:
    """A point estimate: z [K, Z] is the mean of the encoder's outputs [K, C, Z] over transitions. It has no prior."""

    def infer(self, outputs: Array) -> PosteriorArrays:
        self._shape = outputs.shape
        mean = outputs.mean(1)
        return PosteriorArrays(mean, np.zeros_like(mean))

    def kl(self) -> Array:
        return np.zeros(self._shape[0])

    def backward(self, latent_errors: Array, noise: Array, kl_weight: float) -> Array:
        return np.repeat(latent_errors[:, None] / self._shape[1], self._shape[1], axis=1)


def inference(use_information_bottleneck: bool) -> GaussianProduct | Point:
    """Return the inference method: a Gaussian posterior with the information bottleneck, otherwise a point estimate."""
    return GaussianProduct() if use_information_bottleneck else Point()


class GradientPart:
    """Gradients for some of a minibatch's K tasks, scaled so that all parts add up to the minibatch's gradient.

    Call `critic_gradients`, update the Q-functions, then call `actor_gradients`.
    """

    def __init__(
        self,
        settings: PEARL,
        discount: float,
        params: Mapping[str, FlatParams],
        networks: PEARLNetworks,
        minibatch: Minibatch,
        tasks: slice,
    ) -> None:
        self._settings, self._discount, self._tasks = settings, discount, tasks
        K, self._num_rows = minibatch.transitions.rewards.shape
        self._total_rows = K * self._num_rows
        self._inference = inference(settings.use_information_bottleneck)
        self.params: dict[str, FlatParams] = {
            name: flat if LAYOUT[name].optimizer is None else flat.with_own_gradient() for name, flat in params.items()
        }
        flat_networks = {
            name: FlatNetwork.of(LAYOUT[name].here[:-1], networks.of(name).spec, flat, fold_bias=True)
            for name, flat in self.params.items()
        }
        self._encoder, self._policy, self._v, self._target_v = (
            flat_networks[name] for name in ("encoder", "policy", "v", "target_v")
        )
        self._qs = {name: flat_networks[name] for name in TWINS}
        self._dtype = params["policy"].vector.dtype
        rows = (tasks.stop - tasks.start) * self._num_rows
        self._z = np.empty((rows, settings.latent_size), self._dtype)
        state_size, q_size = self._v.input_size, self._qs["q1"].input_size
        self._action_columns = slice(state_size - settings.latent_size, q_size - settings.latent_size)
        self._latent_columns = slice(q_size - settings.latent_size, q_size)

    def critic_gradients(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        """Write the gradients of Σ mean (Q - y)² + kl_weight · Σ KL for the encoder and the Q-functions.

        Return metrics as sums over this part's rows; kl and latent_std are sums over its tasks.
        """
        assert minibatch.context is not None
        latent_noise = noise.latent[self._tasks].astype(self._dtype, copy=False)
        outputs = self._encoder.forward(*context_features(self._settings, minibatch.context, self._tasks))
        posterior = self._inference.infer(outputs.reshape(len(latent_noise), -1, outputs.shape[1]))
        self._z.reshape(len(latent_noise), self._num_rows, -1)[:] = posterior.sample(latent_noise)[:, None]
        batch = minibatch.transitions
        targets = self._targets(batch)
        latent_errors = np.zeros_like(posterior.mean)
        loss = 0.0
        for name, q in self._qs.items():
            errors = self._q(name, batch, self._rows(batch.actions)) - targets
            loss += _sum_of_squares(errors)
            by_row = q.input_gradient((errors * (2 / self._total_rows))[:, None], self._latent_columns, write=True)
            latent_errors += by_row.reshape(-1, self._num_rows, by_row.shape[1]).sum(1)
        encoder_errors = self._inference.backward(latent_errors, latent_noise, self._settings.kl_weight)
        self._encoder.backward(encoder_errors.reshape(-1, encoder_errors.shape[-1]))
        return {
            "q_loss": loss,
            "q_target": float(targets.sum(dtype=np.float64)),
            "kl": float(self._inference.kl().sum(dtype=np.float64)),
            "latent_std": float(np.sqrt(posterior.variance).mean(-1).sum(dtype=np.float64)),
        }

    def actor_gradients(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        """Write the loss gradients of V and the policy, holding the latent variables from `critic_gradients` fixed.

        Return metrics as sums over this part's rows.
        """
        batch = minibatch.transitions
        outputs = self._policy.forward(self._rows(batch.observations), self._z)
        acting = TanhGaussianActions(outputs, self._rows(noise.actions))
        values = {name: self._q(name, batch, acting.actions) for name in self._qs}
        lowest = reduce(np.minimum, values.values())

        errors = self._v.forward(self._rows(batch.observations), self._z)[:, 0] - (lowest - acting.log_prob)
        self._v.backward(errors[:, None] * (2 / self._total_rows))

        penalty, output_errors = self._regularization(acting)
        output_errors += acting.backward(-self._action_slopes(values), 1.0)
        output_errors *= 1 / self._total_rows
        self._policy.backward(output_errors)
        log_prob = float(acting.log_prob.sum(dtype=np.float64))
        return {
            "value_loss": _sum_of_squares(errors),
            "policy_loss": log_prob - float(lowest.sum(dtype=np.float64)) + penalty,
            "entropy": -log_prob,
        }

    def _targets(self, batch: Transitions) -> Array:
        continuing = (self._discount * ~self._rows(batch.terminated)).astype(self._dtype)
        next_values = self._target_v.forward(self._rows(batch.next_observations), self._z)[:, 0]
        rewards = self._rows(batch.rewards).astype(self._dtype, copy=False)
        return self._settings.reward_scale * rewards + continuing * next_values

    def _q(self, name: str, batch: Transitions, actions: Array) -> Array:
        return self._qs[name].forward(self._rows(batch.observations), actions, self._z)[:, 0]

    def _action_slopes(self, values: Mapping[str, Array]) -> Array:
        """Return the gradient of each row's lower Q-value with respect to the action, [n, A]."""
        first_is_lower = values["q1"] <= values["q2"]
        slopes = np.empty((len(first_is_lower), self._action_columns.stop - self._action_columns.start), self._dtype)
        for name, lower in (("q1", first_is_lower), ("q2", ~first_is_lower)):
            rows = lower.nonzero()[0]
            ones = np.ones((len(rows), 1), self._dtype)
            slopes[rows] = self._qs[name].input_gradient(ones, self._action_columns, rows)
        return slopes

    def _regularization(self, acting: TanhGaussianActions) -> tuple[float, Array]:
        """Return the sum of all rows' penalties, and its gradient with respect to the policy's outputs, [n, 2A]."""
        settings, A = self._settings, acting.mean.shape[1]
        by_mean = settings.policy_mean_reg / A * acting.mean
        by_log_std = settings.policy_std_reg / A * acting.log_std
        by_u = settings.policy_pre_activation_reg * acting.u
        value = float((by_mean * acting.mean + by_log_std * acting.log_std + by_u * acting.u).sum(dtype=np.float64))
        to_log_std = (by_log_std + by_u * acting.deviation) * acting.inside
        return value, 2 * np.concatenate([by_mean + by_u, to_log_std], axis=1)

    def _rows(self, values: Array) -> Array:
        """Return this part of values [K, N, ...] as rows [n, ...]."""
        return values[self._tasks].reshape(-1, *values.shape[2:])


def context_features(settings: PEARL, context: Transitions, tasks: slice) -> Sequence[Array]:
    """Return the encoder's inputs for the contexts of some tasks, as one array [rows, ...] per feature."""
    features = [context.observations, context.actions, context.rewards[..., None]]
    if settings.use_next_obs_in_context:
        features.append(context.next_observations)
    return [feature[tasks].reshape(-1, feature.shape[-1]) for feature in features]


def _sum_of_squares(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())


class PEARLKernel(FusedGradientSteps[Noise]):
    """PEARL's fused gradient steps, on working copies of the networks."""

    layout = LAYOUT
    epsilon: ClassVar[float | None] = ADAM_EPSILON
    _settings: PEARL
    _networks: PEARLNetworks

    def prepare(self) -> None:
        self._parts: list[GradientPart] = []
        self._shape: tuple[int, ...] = ()

    def step(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        assert minibatch.context is not None
        shape = (*minibatch.transitions.rewards.shape, minibatch.context.rewards.shape[1])
        if shape != self._shape:
            self._shape, num_parts = shape, min(MAX_PARTS, shape[0])
            bounds = [shape[0] * i // num_parts for i in range(num_parts + 1)]
            self._parts = [
                GradientPart(self._settings, self._discount, self.copies, self._networks, minibatch, slice(start, stop))
                for start, stop in pairwise(bounds)
            ]
        sums = self._over_parts(lambda part: part.critic_gradients(minibatch, noise))
        self._descend(("q1", "q2", "encoder"))
        sums |= self._over_parts(lambda part: part.actor_gradients(minibatch, noise))
        self._descend(("v", "policy"))
        tau, target = self._settings.soft_target_tau, self.copies["target_v"].vector
        target *= 1 - tau
        target += tau * self.copies["v"].vector
        K, N, _ = self._shape
        return {name: value / (K if name in ("kl", "latent_std") else K * N) for name, value in sums.items()}

    def _over_parts(self, gradients: Callable[[GradientPart], Metrics]) -> Metrics:
        by_part = list(self._parallel(gradients, self._parts))
        return {name: sum(part[name] for part in by_part) for name in by_part[0]}

    def _descend(self, names: Sequence[str]) -> None:
        def descend(name: str) -> None:
            flat = self.copies[name]
            np.copyto(flat.gradient, self._parts[0].params[name].gradient)
            for part in self._parts[1:]:
                flat.gradient += part.params[name].gradient
            flat.step(self._rates[name])

        for _ in self._parallel(descend, names):
            pass


def infer(settings: PEARL, encoder: Network, params: Params, context: Transitions) -> PosteriorArrays:
    """Return the posterior [1, Z] of a task, given its context [1, C]."""
    network = FlatNetwork.of(encoder.prefix, encoder.spec, FlatParams(params), fold_bias=True)
    outputs = network.forward(*context_features(settings, context, slice(0, 1)))
    return inference(settings.use_information_bottleneck).infer(outputs[None])
