"""PPO2: PPO with the critic in the same gradient steps and its changes clipped, after OpenAI Baselines' code."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic, OptimizerName, clipped_policy_loss
from metaloom.pipeline.types import Array


class PPO2(ActorCritic):
    """Policy and critic learn together in epochs over an iteration's steps; both stay near where they started."""

    name: Literal["ppo2"] = "ppo2"

    optimizer: ClassVar[OptimizerName] = "adam"

    num_epochs: int = Field(default=3, ge=1)
    """Passes over the samples of an iteration."""
    batch_size: int = Field(default=32, ge=1)
    """Environment steps per gradient step; an epoch's steps are dealt into equal parts of at most so many."""
    entropy_coeff: float = Field(default=1e-3, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    value_target: Literal["td_lambda", "empirical"] = "empirical"
    """What the critic learns: its own values plus advantages, or the discounted returns that were observed."""
    clip_eps: float = Field(default=0.1, gt=0)
    """Clipping range ε of the likelihood ratio, and of the change of a value."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the critic's loss."""

    def policy_loss(self, log_prob: Array, old_log_prob: Array, advantages: Array) -> tuple[float, Array]:
        """The clipped surrogate and its derivatives; see ActorCritic."""
        return clipped_policy_loss(log_prob, old_log_prob, advantages, self.clip_eps)

    def value_loss(self, values: Array, old_values: Array, targets: Array) -> tuple[float, Array]:
        """½ mean max((v - t)², (v_old + clip(v - v_old, ±ε) - t)²) and its derivatives; see ActorCritic."""
        change = values - old_values
        plain = values - targets
        clipped = old_values + np.clip(change, -self.clip_eps, self.clip_eps) - targets
        uses_plain = np.square(plain) >= np.square(clipped)
        loss = 0.5 * float(np.square(np.where(uses_plain, plain, clipped)).mean())
        # Where the clipped error is the larger one, the value lies outside the range and moving it changes nothing.
        return loss, np.where(uses_plain, plain, np.float32(0)) / np.float32(len(values))
