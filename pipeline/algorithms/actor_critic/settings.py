"""Settings that A2C, PPO and PPO2 have in common, and what each of them has to say about its losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from metaloom.pipeline.algorithms.learning_rate import LearningRate
from metaloom.pipeline.types import Array

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.actor_critic.learner import ActorCriticLearner
    from metaloom.pipeline.estimation.config import ProcessingConfig

LayerSize = Annotated[int, Field(ge=1)]
OptimizerName = Literal["adam", "rmsprop"]

RUN_DEFAULTS: Mapping[str, Any] = {
    "num_tasks": 1,
    "env": {"action_scale": None},
    "baseline": {"name": "zero"},
    "processing": {"gae_lambda": 0.95},
}
"""What a run of these algorithms means by leaving a setting out."""


@dataclass(frozen=True)
class CriticFit:
    """How a critic learns by itself."""

    learning_rate: float
    num_epochs: int
    batch_size: int
    max_grad_norm: float | None


class ActorCritic(LearningRate, ABC):
    """A policy and a critic that learn from the same complete episodes."""

    inner_steps: ClassVar[int] = 0
    learns_from: ClassVar[tuple[str, ...]] = ("advantages",)
    has_critic: ClassVar[bool] = True
    num_particles: ClassVar[int] = 1
    run_defaults: ClassVar[Mapping[str, Any]] = RUN_DEFAULTS
    optimizer: ClassVar[OptimizerName]

    num_epochs: int = Field(default=1, ge=1)
    """Passes over the samples of an iteration."""
    batch_size: int = Field(default=64, ge=1)
    """Environment steps per gradient step; an epoch's steps are dealt into equal parts of at most so many."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Longer policy gradients are shortened to this Euclidean norm."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    initial_output_scale: float = Field(default=0.01, ge=0)
    """Multiplies the policy's output layer at the start: near 0, no observation sways the first actions."""
    advantage_scaling: Literal["batch", "running"] = "batch"
    """With processing.normalize_advantages: statistics of this iteration's steps, or of all steps so far."""
    critic_hidden_sizes: tuple[LayerSize, ...] = Field(default=(64, 64), min_length=1)
    """Units in each hidden layer of the critic."""
    value_target: Literal["td_lambda", "empirical"] = "td_lambda"
    """What the critic learns: its own values plus advantages, or the discounted returns that were observed."""

    @property
    def critic_fit(self) -> CriticFit | None:
        """How the critic learns by itself before the policy; None: along with it, from the same minibatches."""
        return None

    @property
    def critic_weight(self) -> float:
        """Weight of the critic's loss in the gradient steps that it shares with the policy."""
        return getattr(self, "value_coeff", 1.0)

    @property
    def particle(self) -> ActorCritic:
        """The settings of one policy with its critic: these."""
        return self

    def build(self, processing: ProcessingConfig) -> ActorCriticLearner:
        """The algorithm that these settings describe, for rewards discounted as `processing` says."""
        from metaloom.pipeline.algorithms.actor_critic.learner import ActorCriticLearner

        return ActorCriticLearner(self, processing)

    @abstractmethod
    def policy_loss(self, log_prob: Array, old_log_prob: Array, advantages: Array) -> tuple[float, Array]:
        """Mean loss of n actions and its derivatives with respect to their log-probabilities, [n].

        Args:
            log_prob: [n] under the policy that learns.
            old_log_prob: [n] under the policy that acted.
            advantages: [n].
        """

    def value_loss(self, values: Array, old_values: Array, targets: Array) -> tuple[float, Array]:
        """Mean of half the squared errors of the critic, and its derivatives with respect to the values, [n]."""
        del old_values
        errors = values - targets
        return 0.5 * float(np.square(errors).mean()), errors / np.float32(len(errors))


def clipped_policy_loss(
    log_prob: Array, old_log_prob: Array, advantages: Array, clip_eps: float
) -> tuple[float, Array]:
    """-mean min(r A, clip(r, 1 ± ε) A) and its derivatives; Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    ratio = np.exp(log_prob - old_log_prob)
    plain = ratio * advantages
    clipped = np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantages
    n = np.float32(len(ratio))
    # Where clipping lowers the objective, the minimum no longer depends on the policy.
    return -float(np.minimum(plain, clipped).mean()), np.where(plain <= clipped, plain, np.float32(0)) / -n
