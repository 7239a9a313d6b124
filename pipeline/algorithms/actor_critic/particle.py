"""One policy with its critic while an iteration changes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.experience import Experience
from metaloom.pipeline.algorithms.actor_critic.heads import CategoricalHead, GaussianHead, Head
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic, OptimizerName
from metaloom.pipeline.kernels.flat_networks import FlatParams, Network, layer_paths, prefixed, unprefixed
from metaloom.pipeline.nn.mlp import initialize_mlp, layer_names
from metaloom.pipeline.nn.optimizers import AdamInPlace, RMSpropInPlace
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.gaussian import LOG_STD, MEAN_NETWORK, GaussianPolicy
from metaloom.pipeline.policies.inference import LOGITS_NETWORK
from metaloom.pipeline.types import Array, LearnerState

CRITIC = "critic"
POLICY = "policy"
Policy = GaussianPolicy | CategoricalPolicy
Optimizer = AdamInPlace | RMSpropInPlace
OPTIMIZERS: dict[OptimizerName, type[Optimizer]] = {"adam": AdamInPlace, "rmsprop": RMSpropInPlace}


@dataclass(frozen=True)
class Minibatch:
    """Rows of an iteration's steps: observations [n, O], actions, and the numbers [n] that go with them."""

    observations: Array
    actions: Array
    old_log_prob: Array
    advantages: Array
    old_values: Array
    targets: Array

    def shuffled(self, order: Array) -> Minibatch:
        """The same rows in another order."""
        return Minibatch(*(getattr(self, name)[order] for name in self.__dataclass_fields__))

    def part(self, rows: slice) -> Minibatch:
        """Some of the rows."""
        return Minibatch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.actions)


class Particle:
    """Working copies of a policy, its critic and their optimizers.

    Attributes:
        policy: parameters of the policy as one vector, with the gradient of the last loss.
        learned: [D] bool, which of them learning changes.
        critic: of the critic likewise.
        value_function: the critic's network, [n, O] -> [n, 1].
    """

    def __init__(self, settings: ActorCritic, policy: Policy, learner: LearnerState) -> None:
        self._settings = settings
        self.policy = FlatParams(learner.params)
        learned = policy.learned(learner.params)
        self.learned = np.concatenate([np.full(value.size, name in learned) for name, value in learner.params.items()])
        self.critic = FlatParams(unprefixed(learner.extra, CRITIC))
        num_hidden = len(policy.config.hidden_sizes)
        self._network = Network(self.policy, layer_paths(_network_name(policy), num_hidden))
        self._head = _head(policy, self.policy)
        self.value_function = Network(self.critic, layer_names(len(settings.critic_hidden_sizes)))
        optimizer = OPTIMIZERS[settings.optimizer]
        self._policy_optimizer = optimizer.of(unprefixed(learner.optimizer, POLICY))
        self._critic_optimizer = optimizer.of(unprefixed(learner.optimizer, CRITIC))

    def policy_gradient(self, batch: Minibatch) -> tuple[float, float]:
        """Put the gradient of the policy's loss on a minibatch in place; returns loss and norm before clipping."""
        outputs = self._network.forward(batch.observations)
        log_prob = self._head.log_prob(outputs, batch.actions)
        loss, weights = self._settings.policy_loss(log_prob, batch.old_log_prob, batch.advantages)
        self._network.backward(self._head.backward(weights, self._settings.entropy_coeff))
        return loss, self.policy.clip_gradient(self._settings.max_grad_norm)

    def critic_gradient(self, batch: Minibatch, weight: float, max_norm: float | None = None) -> None:
        """Put the gradient of `weight` times the critic's loss on a minibatch in place."""
        values = self.value_function.forward(batch.observations)[:, 0]
        _, slopes = self._settings.value_loss(values, batch.old_values, batch.targets)
        self.value_function.backward(np.float32(weight) * slopes[:, None])
        self.critic.clip_gradient(max_norm)

    def step_policy(self, gradient: Array, learning_rate: float) -> None:
        """Move the policy against a gradient [D]."""
        self._policy_optimizer.step(self.policy.vector, gradient, learning_rate)

    def step_critic(self, learning_rate: float) -> None:
        """Move the critic against its gradient."""
        self._critic_optimizer.step(self.critic.vector, self.critic.gradient, learning_rate)

    def describe(self, batch: Minibatch, experience: Experience) -> dict[str, float]:
        """Losses, KL, entropy on all rows, by name."""
        outputs = self._network.forward(batch.observations)
        log_prob = self._head.log_prob(outputs, batch.actions)
        values = self.value_function.forward(batch.observations)[:, 0]
        described = {
            "loss": self._settings.policy_loss(log_prob, batch.old_log_prob, batch.advantages)[0],
            "value_loss": 0.5 * float(np.square(values - batch.targets, dtype=np.float64).mean()),
            "kl": self._head.kl(experience.behavior, outputs),
            "entropy": self._head.entropy(outputs),
        }
        if (clip_eps := getattr(self._settings, "clip_eps", None)) is not None:
            outside = np.abs(np.exp(log_prob - batch.old_log_prob) - 1) > clip_eps
            described["clip_fraction"] = float(outside.mean())
        return described

    def learner(self) -> LearnerState:
        """The particle's part of the learner; of `extra` only the critic."""
        return LearnerState(
            self.policy.copies(),
            prefixed(self._policy_optimizer.state, POLICY) | prefixed(self._critic_optimizer.state, CRITIC),
            prefixed(self.critic.copies(), CRITIC),
        )


def initial_learner(settings: ActorCritic, policy: Policy, rng: np.random.Generator) -> LearnerState:
    """A policy and critic that have learned nothing."""
    params = policy.initialize(rng)
    params[f"{_network_name(policy)}.output.kernel"] *= np.float32(settings.initial_output_scale)
    sizes = settings.critic_hidden_sizes
    critic = {
        name.removeprefix(f"{CRITIC}."): value
        for name, value in initialize_mlp(CRITIC, policy.observation_size, sizes, 1, rng).items()
    }
    optimizer = OPTIMIZERS[settings.optimizer]
    return LearnerState(
        params,
        prefixed(optimizer.initial(FlatParams(params).vector), POLICY)
        | prefixed(optimizer.initial(FlatParams(critic).vector), CRITIC),
        prefixed(critic, CRITIC),
    )


def critic_of(settings: ActorCritic, learner: LearnerState) -> Network:
    """The critic's network in a particle's learner."""
    return Network(FlatParams(unprefixed(learner.extra, CRITIC)), layer_names(len(settings.critic_hidden_sizes)))


def _network_name(policy: Policy) -> str:
    return LOGITS_NETWORK if isinstance(policy, CategoricalPolicy) else MEAN_NETWORK


def _head(policy: Policy, flat: FlatParams) -> Head:
    if isinstance(policy, CategoricalPolicy):
        return CategoricalHead()
    config = policy.config
    return GaussianHead(flat.params[LOG_STD], flat.gradients[LOG_STD], config.min_std, learn_std=config.learn_std)
