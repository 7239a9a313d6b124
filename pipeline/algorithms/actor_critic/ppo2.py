"""PPO2: PPO with the critic in the same gradient steps and its changes clipped, after OpenAI Baselines' code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic


class PPO2(ActorCritic):
    """Policy and critic learn together in epochs over an iteration's steps; both stay near where they started."""

    name: Literal["ppo2"] = "ppo2"

    num_epochs: int = Field(default=3, ge=1)
    """Passes over the samples of an iteration."""
    batch_size: int = Field(default=32, ge=1)
    """Environment steps per gradient step; an epoch's steps are dealt into equal parts of at most so many."""
    entropy_coeff: float = Field(default=1e-3, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    value_target: Literal["td_lambda", "empirical"] = "empirical"
    """Targets of the critic: its own values plus advantages, or the discounted returns that were observed."""
    clip_eps: float = Field(default=0.1, gt=0)
    """Clipping range ε of the likelihood ratio, and of the change of a value."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the critic's loss."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps

    @property
    def value_clip(self) -> float:
        return self.clip_eps

    @property
    def critic_weight(self) -> float:
        return self.value_coeff
