"""PEARL in torch, for any network and device: networks, task inference, the gradient step and the learner.

Rakelly et al. 2019, arXiv:1903.08254, algorithm 1; equation numbers refer to that paper unless otherwise stated.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.learner import Layout, OffPolicyLearner, Stored, TorchGradientSteps
from metaloom.pipeline.algorithms.off_policy.parts import (
    TanhGaussianSample,
    TransitionTensors,
    TwinQ,
    sample,
    tensor_like,
    transitions_like,
)
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS
from metaloom.pipeline.policies.actors.off_policy import BELIEF_MEAN, BELIEF_VARIANCE, POLICY_NETWORK
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Minibatch, ParallelMap, Params, TaskParams, Transitions

TWINS = ("q1", "q2")
LAYOUT: Layout = {
    "policy": Stored("params", f"{POLICY_NETWORK}.", f"{POLICY_NETWORK}.", "policy."),
    "encoder": Stored("params", "encoder.", "encoder.", "encoder."),
    "q1": Stored("extra", "q1.", "q1.", "q.q1."),
    "q2": Stored("extra", "q2.", "q2.", "q.q2."),
    "v": Stored("extra", "v.", "v.", "v."),
    "target_v": Stored("extra", "target_v.", "v."),
}
"""Locations of the networks in the state; `target_v` is V's target network."""

METRICS = ("q_loss", "value_loss", "policy_loss", "kl", "latent_std", "entropy", "q_target")
"""Names of the metrics that a gradient step returns."""
HIDDEN_BIAS = 0.1
OUTPUT_LIMIT, POLICY_OUTPUT_LIMIT = 3e-3, 1e-3
ADAM_EPSILON = 1e-8
MIN_VARIANCE = 1e-7


@dataclass(frozen=True)
class PEARLNetworks:
    """The networks of PEARL."""

    policy: Network  # maps (o, z) to the means and log standard deviations of the action before the tanh
    encoder: Network  # maps (o, a, r) or (o, a, r, o') to a factor of the posterior over z
    q: Network  # maps (o, a, z) to a value; named after the first Q-function and shared by both
    v: Network  # maps (o, z) to a value

    @classmethod
    def build(cls, settings: PEARL, setup: Setup) -> "PEARLNetworks":
        """Build the networks for a run; hidden layers use ReLU unless policy.activation is set."""
        A, Z = setup.action_size, settings.latent_size
        seen = A + 1 + (setup.observation_size if settings.use_next_obs_in_context else 0)
        inferred = Z * (2 if settings.use_information_bottleneck else 1)

        def network(prefix: str, config: PolicyConfig, output_size: int, extra_size: int) -> Network:
            spec = config.network_spec(setup, output_size, extra_size=extra_size, activation="relu")
            return build_network(prefix, spec)

        critic = setup.policy.critic(settings.critic_hidden_sizes)
        return cls(
            network(POLICY_NETWORK, setup.policy, 2 * A, Z),
            network("encoder", setup.policy.critic(settings.encoder_hidden_sizes), inferred, seen),
            network("q1", critic, 1, A + Z),
            network("v", critic, 1, Z),
        )

    def of(self, part: str) -> Network:
        """Return the network whose parameters are the given part of LAYOUT."""
        return {"policy": self.policy, "encoder": self.encoder, "v": self.v, "target_v": self.v}.get(part, self.q)


def initialize(network: Network, rng: np.random.Generator, *, output_limit: float = OUTPUT_LIMIT) -> Params:
    """Draw a network's initial parameters, layer by layer.

    Hidden kernels are drawn from U(±1/√in), where `in` is the layer's fan-in, and hidden biases are 0.1. The output
    layer's kernel and bias are drawn from U(±output_limit), as in Lillicrap et al. 2016, arXiv:1509.02971, section 7. A
    custom module keeps its constructor's initialization.
    """
    if network.spec.name not in BUILT_IN_NETWORKS:
        return network.initialize(rng)
    require_room(network.shapes, setting=f"algorithm, network {network.prefix}")
    params: Params = {}
    for name, shape in network.shapes.items():
        layer, _, part = name.rpartition(".")
        if layer.endswith(".output"):
            value = rng.uniform(-output_limit, output_limit, shape)
        elif part == "bias":
            value = np.full(shape, HIDDEN_BIAS)
        else:
            # Dense kernels have shape (in, out), convolution kernels (out, in, k, k).
            limit = 1 / np.sqrt(shape[0] if len(shape) == 2 else math.prod(shape[1:]))
            value = rng.uniform(-limit, limit, shape)
        params[name] = value.astype(np.float32)
    return params


@dataclass(frozen=True)
class Noise:
    """Standard normal noise for one gradient step."""

    latent: Array  # [K, Z]
    actions: Array  # [K, N, A]


class Posterior(NamedTuple):
    """Gaussian posteriors over the latent variables of K tasks."""

    mean: Tensor  # [K, Z]
    variance: Tensor  # 0 for point posteriors, [K, Z]

    def kl(self) -> Tensor:
        """Return KL(posterior ‖ N(0, I)) = ½ Σ (σ² + μ² - 1 - log σ²) for each task in nats, [K]."""
        return 0.5 * (self.variance + self.mean.square() - 1 - self.variance.log()).sum(-1)


def posterior(outputs: Tensor) -> Posterior:
    """Return q(z|c) ∝ ∏ N(z; μ_n, σ²_n), with one factor per transition. Eq. 2.

    The product is the Gaussian with 1/σ² = Σ 1/σ²_n and μ = σ² Σ μ_n/σ²_n. The encoder's outputs [K, C, 2Z] are μ_n,
    then the softplus inputs for σ²_n, which is at least 1e-7.
    """
    means, raw = outputs.chunk(2, -1)
    precisions = 1 / softplus(raw, threshold=50).clamp(min=MIN_VARIANCE)
    variance = 1 / precisions.sum(1)
    return Posterior(variance * (means * precisions).sum(1), variance)


def point(outputs: Tensor) -> Posterior:
    """Return the point posterior used if the information bottleneck is off: the mean of the outputs [K, C, Z]."""
    mean = outputs.mean(1)
    return Posterior(mean, torch.zeros_like(mean))


def td_targets(settings: PEARL, batch: TransitionTensors, discount: float, next_values: Tensor) -> Tensor:
    """Return the TD targets y = reward_scale · r + (1 - terminated) γ V̄(o', z), [n]. Eq. 3."""
    return settings.reward_scale * batch.rewards + discount * (1 - batch.terminated) * next_values


def value_loss(values: Tensor, lowest: Tensor, log_prob: Tensor) -> Tensor:
    """Return mean (V(o, z) - (min_j Q_j(o, a', z) - log π(a'|o, z)))². Haarnoja et al. 2018, arXiv:1801.01290, (5)."""
    return (values - (lowest - log_prob).detach()).square().mean()


def policy_loss(settings: PEARL, acting: TanhGaussianSample, lowest: Tensor) -> Tensor:
    """Return the mean of log π(a'|o, z) - min_j Q_j(o, a', z), plus the regularization terms. Eq. 4."""
    return (
        (acting.log_prob - lowest).mean()
        + settings.policy_mean_reg * acting.mean.square().mean()
        + settings.policy_std_reg * acting.log_std.square().mean()
        + settings.policy_pre_activation_reg * acting.u.square().sum(-1).mean()
    )


def infer(settings: PEARL, encoder: Network, params: Mapping[str, Tensor], context: TransitionTensors) -> Posterior:
    """Return the posteriors of K tasks, given their contexts [K, C]."""
    features = [context.observations, context.actions, context.rewards[..., None]]
    if settings.use_next_obs_in_context:
        features.append(context.next_observations)
    K, C = context.rewards.shape
    outputs = encoder(params, torch.cat(features, -1).flatten(0, 1)).view(K, C, -1)
    return posterior(outputs) if settings.use_information_bottleneck else point(outputs)


class PEARLDefinition(TorchGradientSteps[Noise]):
    """PEARL's gradient steps in torch, on working copies of the networks."""

    layout: ClassVar[Layout] = LAYOUT
    epsilon: ClassVar[float | None] = ADAM_EPSILON
    _settings: PEARL
    _networks: PEARLNetworks

    def copied(self, name: str, state: LearnerState) -> FlatTensors:
        """Return a working copy of a part of a state, with both Q-functions in one vector."""
        if name not in TWINS:
            return super().copied(name, state)
        if name == TWINS[0]:
            first, second = (LAYOUT[twin].of(state) for twin in TWINS)
            self._q = TwinQ(self._networks.q, first | second, self._device)
        return self._q.half(name)

    def step(self, minibatch: Minibatch, noise: Noise) -> dict[str, Tensor]:
        """Infer the tasks, update the Q-functions and the encoder, then update V and the policy.

        Latent variables are drawn once per step. V and the policy learn from the updated Q-functions.
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
            self.copies[name].step(self._rates[name])


class PEARLLearner(OffPolicyLearner[ContextRounds, Noise]):
    """Learner that infers tasks, and trains a soft actor-critic conditioned on each task's latent variable."""

    definition: ClassVar[type[TorchGradientSteps[Any]]] = PEARLDefinition
    metrics: ClassVar[tuple[str, ...]] = METRICS
    counters: ClassVar[tuple[str, ...]] = (NUM_UPDATES,)
    finite: ClassVar[Mapping[str, str]] = {name: name for name in LAYOUT}
    lower = "algorithm.reward_scale or the learning rates of algorithm"
    settings: PEARL

    def __init__(self, settings: PEARL, setup: Setup) -> None:
        super().__init__(settings, setup, discrete=False)
        self.networks: PEARLNetworks = PEARLNetworks.build(settings, setup)
        rates = {
            "policy": settings.policy_learning_rate,
            "encoder": settings.encoder_learning_rate,
            "q1": settings.q_learning_rate,
            "q2": settings.q_learning_rate,
            "v": settings.v_learning_rate,
        }
        others = ["network is an mlp of tanh"] if self.networks.policy.spec.activation == "tanh" else []
        networks = self.networks.policy, self.networks.encoder, self.networks.q, self.networks.v
        self.set_up(rates, *networks, others=others)

    def initialize(self, *, run_seed: int) -> LearnerState:
        rng, networks = generator(run_seed, "initialize"), self.networks
        parts = {"policy": initialize(networks.policy, rng, output_limit=POLICY_OUTPUT_LIMIT)}
        parts |= {name: initialize(networks.of(name), rng) for name in ("encoder", "q1", "q2", "v")}
        parts["q2"] = renamed(parts["q2"], *TWINS)
        parts["target_v"] = {name: value.copy() for name, value in parts["v"].items()}
        return self.first_state(parts)

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the policy and the prior over z: N(0, I), or a point mass at 0 without the bottleneck."""
        shared = TaskParams.broadcast(LAYOUT["policy"].of(state), num_tasks).params
        mean = np.zeros((num_tasks, self.settings.latent_size), np.float32)
        variance = np.ones_like(mean) if self.settings.use_information_bottleneck else np.zeros_like(mean)
        return TaskParams({**shared, BELIEF_MEAN: mean, BELIEF_VARIANCE: variance})

    def infer(self, state: LearnerState, contexts: Iterable[Transitions]) -> TaskParams:
        """Return each task's posterior, `belief.mean` and `belief.variance` [B, Z], given its context [1, C]."""
        network, encoder = self.networks.encoder, LAYOUT["encoder"].of(state)

        @torch.no_grad()
        def of_task(context: Transitions) -> tuple[Array, Array]:
            if self.kernel.name == "fused":
                found = fused(infer)(self.settings, network, encoder, context)
                return found.mean, found.variance
            flat = FlatTensors(encoder, self._device)
            found = infer(self.settings, network, flat.params, transitions_like(flat.vector, context))
            return found.mean.cpu().numpy(), found.variance.cpu().numpy()

        # One task at a time: C may differ, and a task's result must not depend on the number of tasks.
        means, variances = zip(*map(of_task, contexts), strict=True)
        return TaskParams({BELIEF_MEAN: np.concatenate(means), BELIEF_VARIANCE: np.concatenate(variances)})

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: ContextRounds, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Return `params` with the posterior inferred from transitions of the rollout batches.

        After training, all transitions are used, and nothing is inferred from fewer than `num_exp_traj_eval` episodes.
        """
        if evidence.position is None and evidence.num_episodes < self.settings.num_exp_traj_eval:
            return params
        contexts = evidence.transitions(self.settings.embedding_batch_size)
        return TaskParams({**params.params, **self.infer(state, map(self._shown, contexts)).params})

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Noise:
        shape = minibatch.transitions.actions.shape
        latent = rng.standard_normal((shape[0], self.settings.latent_size), np.float32)
        return Noise(latent, rng.standard_normal(shape, np.float32))

    def shown(self, minibatch: Minibatch) -> Minibatch:
        return replace(minibatch, context=self._shown(minibatch.context))

    def _shown(self, context: Transitions | None) -> Transitions:
        """Return the context that the encoder sees: with sparse rewards if they are enabled."""
        if context is None:
            raise ValueError("update: a minibatch has no context; PEARL requires one to infer its tasks")
        if not self.settings.sparse_rewards:
            return context
        return replace(context, rewards=self._setup.sparse_rewards(context.rewards))
