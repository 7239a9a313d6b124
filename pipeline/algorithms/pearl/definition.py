"""PEARL in torch: the definition of its inference and of its gradient step, for any networks and on any device.

Rakelly et al. 2019, arXiv:1903.08254, algorithm 1; equations are of that paper unless another is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metaloom.pipeline.algorithms.off_policy.parts import (
    TanhGaussianSample,
    TransitionTensors,
    TwinQ,
    sample,
    tensor_like,
    transitions_like,
)
from metaloom.pipeline.algorithms.pearl.networks import TRAINED, TWINS, PEARLArrays, PEARLNetworks
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.torch_optimizers import vector_optimizer
from metaloom.pipeline.types import Array, LearnerState, Minibatch

METRICS = ("q_loss", "value_loss", "policy_loss", "kl", "latent_std", "entropy", "q_target")
"""Names of the metrics of a gradient step."""
ADAM_EPSILON = 1e-8
MIN_VARIANCE = 1e-7


@dataclass(frozen=True)
class Noise:
    """Standard normal noise of one gradient step."""

    latent: Array
    actions: Array


class Posterior(NamedTuple):
    """Gaussians over the latent variables of K tasks: mean and variance, [K, Z] each; variance 0 for single points."""

    mean: Tensor
    variance: Tensor

    def kl(self) -> Tensor:
        """Return KL(posterior ‖ N(0, I)) = ½ Σ (σ² + μ² - 1 - log σ²) of every task in nats, [K]."""
        return 0.5 * (self.variance + self.mean.square() - 1 - self.variance.log()).sum(-1)


def posterior(outputs: Tensor) -> Posterior:
    """Return q(z|c) ∝ ∏ N(z; μ_n, σ²_n), a factor from each transition. Eq. 2.

    The product is the Gaussian with 1/σ² = Σ 1/σ²_n and μ = σ² Σ μ_n/σ²_n.

    Args:
        outputs: [K, C, 2Z] of the encoder: μ_n, then the input of the softplus, at least 1e-7, that gives σ²_n.
    """
    means, raw = outputs.chunk(2, -1)
    precisions = 1 / softplus(raw, threshold=50).clamp(min=MIN_VARIANCE)
    variance = 1 / precisions.sum(1)
    return Posterior(variance * (means * precisions).sum(1), variance)


def point(outputs: Tensor) -> Posterior:
    """Return the mean of the encoder's outputs [K, C, Z] as the only z; there is no bottleneck."""
    mean = outputs.mean(1)
    return Posterior(mean, torch.zeros_like(mean))


def td_targets(settings: PEARL, batch: TransitionTensors, discount: float, next_values: Tensor) -> Tensor:
    """Return the TD targets y = reward_scale · r + (1 - terminated) γ V̄(o', z), [n]. Eq. 3."""
    return settings.reward_scale * batch.rewards + discount * (1 - batch.terminated) * next_values


def value_loss(values: Tensor, lowest: Tensor, log_prob: Tensor) -> Tensor:
    """Return mean (V(o, z) - (min_j Q_j(o, a', z) - log π(a'|o, z)))². Haarnoja et al. 2018, arXiv:1801.01290, (5)."""
    return (values - (lowest - log_prob).detach()).square().mean()


def policy_loss(settings: PEARL, acting: TanhGaussianSample, lowest: Tensor) -> Tensor:
    """Return the mean of log π(a'|o, z) - min_j Q_j(o, a', z), and the regularization. Eq. 4."""
    return (
        (acting.log_prob - lowest).mean()
        + settings.policy_mean_reg * acting.mean.square().mean()
        + settings.policy_std_reg * acting.log_std.square().mean()
        + settings.policy_pre_activation_reg * acting.u.square().sum(-1).mean()
    )


def infer(settings: PEARL, encoder: Network, params: Mapping[str, Tensor], context: TransitionTensors) -> Posterior:
    """Return the posterior of every task given its context [K, C]; the encoder sees (o, a, r) or (o, a, r, o')."""
    features = [context.observations, context.actions, context.rewards[..., None]]
    if settings.use_next_obs_in_context:
        features.append(context.next_observations)
    K, C = context.rewards.shape
    outputs = encoder(params, torch.cat(features, -1).flatten(0, 1)).view(K, C, -1)
    return posterior(outputs) if settings.use_information_bottleneck else point(outputs)


class PEARLDefinition:
    """Working copies of networks, target V and optimizers during an iteration."""

    def __init__(
        self,
        settings: PEARL,
        networks: PEARLNetworks,
        state: LearnerState,
        *,
        discount: float,
        learning_rates: Mapping[str, float],
        device: torch.device,
    ) -> None:
        self._settings, self._discount, self._networks = settings, discount, networks
        self._learning_rates, arrays = learning_rates, PEARLArrays.of(state)
        self._num_updates = arrays.num_updates
        # The target V has the names of V, so that the same network evaluates it.
        self._prefixes: dict[str, str] = {
            "policy": networks.policy.prefix,
            "encoder": networks.encoder.prefix,
            "v": networks.v.prefix,
            "target_v": networks.v.prefix,
        }
        self._flat = {
            name: FlatTensors(prefixed(arrays.params[name], prefix), device) for name, prefix in self._prefixes.items()
        }
        twins = [prefixed(arrays.params[name], name) for name in TWINS]
        self._q = TwinQ(networks.q, twins[0] | twins[1], device)
        vectors = self._by_network("vector")
        self.gradients: dict[str, Tensor] = self._by_network("gradient")
        self._optimizers = {
            name: vector_optimizer(settings.optimizer, vectors[name], arrays.optimizers[name], epsilon=ADAM_EPSILON)
            for name in TRAINED
        }

    def step(self, minibatch: Minibatch, noise: Noise) -> dict[str, Tensor]:
        """Infer the tasks, take a step down the loss of Q-functions and encoder, then down the loss of V and policy.

        The latent variables are drawn once, for all parts of the step. V and policy learn from the updated
        Q-functions.
        """
        assert minibatch.context is not None
        settings, networks, like = self._settings, self._networks, self._flat["policy"].vector
        context = transitions_like(like, minibatch.context)
        K, N = minibatch.transitions.rewards.shape
        batch = TransitionTensors(*(part.flatten(0, 1) for part in transitions_like(like, minibatch.transitions)))

        belief = infer(settings, networks.encoder, self._flat["encoder"].params, context)
        latent = belief.mean + belief.variance.sqrt() * tensor_like(like, noise.latent)
        kl = belief.kl() if settings.use_information_bottleneck else torch.zeros(K).to(like)
        z = latent[:, None].expand(K, N, -1).flatten(0, 1)
        with torch.no_grad():
            next_values = self._value("target_v", batch.next_observations, z)
        targets = td_targets(settings, batch, self._discount, next_values)
        # The sum over both Q-functions [2, n] of mean (Q(o, a, z) - y)². Eq. 3.
        values = self._q(batch.observations, batch.actions, z, learn=True)
        loss_q = (values - targets).square().mean(1).sum()
        self._q.backward(loss_q + settings.kl_weight * kl.sum(), self._flat["encoder"])
        self._descend("q1", "q2", "encoder")

        z = z.detach()
        outputs = networks.policy(self._flat["policy"].params, torch.cat([batch.observations, z], -1))
        acting = sample(outputs, tensor_like(like, noise.actions).flatten(0, 1))
        lowest = self._q(batch.observations, acting.actions, z).amin(0)
        loss_v = value_loss(self._value("v", batch.observations, z), lowest, acting.log_prob)
        loss_policy = policy_loss(settings, acting, lowest)
        self._flat["v"].backward(loss_v)
        self._flat["policy"].backward(loss_policy)
        self._descend("v", "policy")
        # V̄ ← (1 - τ) V̄ + τ V
        self._flat["target_v"].vector.lerp_(self._flat["v"].vector, settings.soft_target_tau)

        losses, std = (loss_q, loss_v, loss_policy), belief.variance.sqrt().mean()
        described = *losses, kl.mean(), std, -acting.log_prob.mean(), targets.mean()
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))

    def state(self) -> LearnerState:
        params = {name: unprefixed(self._flat[name].copies(), prefix) for name, prefix in self._prefixes.items()}
        twins = self._q.copies()
        params |= {name: unprefixed(twins, name) for name in TWINS}
        optimizers = {name: optimizer.state for name, optimizer in self._optimizers.items()}
        return PEARLArrays(params, optimizers, self._num_updates + 1).state()

    def _value(self, name: Literal["v", "target_v"], observations: Tensor, z: Tensor) -> Tensor:
        return self._networks.v(self._flat[name].params, torch.cat([observations, z], -1))[:, 0]

    def _descend(self, *names: str) -> None:
        for name in names:
            self._optimizers[name].step(self.gradients[name], self._learning_rates[name])

    def _by_network(self, part: Literal["vector", "gradient"]) -> dict[str, Tensor]:
        first, second = getattr(self._q, part).chunk(2)
        own: dict[str, Tensor] = {name: getattr(self._flat[name], part) for name in ("policy", "encoder", "v")}
        return own | {"q1": first, "q2": second}
