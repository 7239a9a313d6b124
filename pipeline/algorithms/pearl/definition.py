"""PEARL in torch: its inference and gradient step, for any networks and device.

Rakelly et al. 2019, arXiv:1903.08254, algorithm 1; equation numbers refer to that paper unless stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metaloom.pipeline.algorithms.off_policy.learner import TorchGradientSteps
from metaloom.pipeline.algorithms.off_policy.parts import (
    TanhGaussianSample,
    TransitionTensors,
    TwinQ,
    sample,
    tensor_like,
    transitions_like,
)
from metaloom.pipeline.algorithms.pearl.networks import LAYOUT, TWINS, PEARLNetworks
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
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
    """Return a point posterior, the mean of the encoder's outputs [K, C, Z], for runs without bottleneck."""
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


class PEARLDefinition(TorchGradientSteps[Noise]):
    """Working copies of networks, target V and optimizers during an iteration."""

    layout = LAYOUT
    epsilon: ClassVar[float | None] = ADAM_EPSILON
    _settings: PEARL
    _networks: PEARLNetworks

    def copied(self, name: str, state: LearnerState) -> FlatTensors:
        """Copy a part, both Q-functions as one vector; see GradientSteps."""
        if name not in TWINS:
            return super().copied(name, state)
        if name == TWINS[0]:
            first, second = (LAYOUT[twin].of(state) for twin in TWINS)
            self._q = TwinQ(self._networks.q, first | second, self._device)
        return self._q.half(name)

    def step(self, minibatch: Minibatch, noise: Noise) -> dict[str, Tensor]:
        """Infer the tasks, take a step of Q-functions and encoder, then one of V and policy.

        Latent variables are drawn once per step. V and policy learn from the updated Q-functions.
        """
        assert minibatch.context is not None
        settings, networks, like = self._settings, self._networks, self.copies["policy"].vector
        context = transitions_like(like, minibatch.context)
        K, N = minibatch.transitions.rewards.shape
        batch = TransitionTensors(*(part.flatten(0, 1) for part in transitions_like(like, minibatch.transitions)))

        belief = infer(settings, networks.encoder, self.copies["encoder"].params, context)
        latent = belief.mean + belief.variance.sqrt() * tensor_like(like, noise.latent)
        kl = belief.kl() if settings.use_information_bottleneck else torch.zeros(K).to(like)
        z = latent[:, None].expand(K, N, -1).flatten(0, 1)
        with torch.no_grad():
            next_values = self._value("target_v", batch.next_observations, z)
        targets = td_targets(settings, batch, self._discount, next_values)
        # The sum over both Q-functions [2, n] of mean (Q(o, a, z) - y)². Eq. 3.
        values = self._q(batch.observations, batch.actions, z, learn=True)
        loss_q = (values - targets).square().mean(1).sum()
        self._q.backward(loss_q + settings.kl_weight * kl.sum(), self.copies["encoder"])
        self._descend("q1", "q2", "encoder")

        z = z.detach()
        outputs = networks.policy(self.copies["policy"].params, torch.cat([batch.observations, z], -1))
        acting = sample(outputs, tensor_like(like, noise.actions).flatten(0, 1))
        lowest = self._q(batch.observations, acting.actions, z).amin(0)
        loss_v = value_loss(self._value("v", batch.observations, z), lowest, acting.log_prob)
        loss_policy = policy_loss(settings, acting, lowest)
        self.copies["v"].backward(loss_v)
        self.copies["policy"].backward(loss_policy)
        self._descend("v", "policy")
        # V̄ ← (1 - τ) V̄ + τ V
        self.copies["target_v"].vector.lerp_(self.copies["v"].vector, settings.soft_target_tau)

        losses, std = (loss_q, loss_v, loss_policy), belief.variance.sqrt().mean()
        described = *losses, kl.mean(), std, -acting.log_prob.mean(), targets.mean()
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))

    def _value(self, name: str, observations: Tensor, z: Tensor) -> Tensor:
        return self._networks.v(self.copies[name].params, torch.cat([observations, z], -1))[:, 0]

    def _descend(self, *names: str) -> None:
        for name in names:
            self.descent[name].step(self._rates[name])
