"""Proximal policy optimization (PPO), Schulman et al. 2017, arXiv:1707.06347, with a critic that learns first."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic, CriticFit


class PPO(ActorCritic):
    """First the critic learns from an iteration's steps, then the policy from advantages by the critic it is then."""

    name: Literal["ppo"] = "ppo"

    num_epochs: int = Field(default=3, ge=1)
    """Passes over the samples of an iteration."""
    clip_eps: float = Field(default=0.1, gt=0)
    """Clipping range ε of the likelihood ratio."""
    critic_learning_rate: float = Field(default=5e-4, gt=0)
    """Step size of the critic's Adam."""
    critic_num_epochs: int = Field(default=10, ge=1)
    """The critic's passes over the samples of an iteration."""
    critic_batch_size: int = Field(default=64, ge=1)
    """Environment steps per gradient step of the critic."""
    critic_max_grad_norm: float | None = Field(default=None, gt=0)
    """Longer critic gradients are shortened to this Euclidean norm."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps

    @property
    def critic_fit(self) -> CriticFit:
        """The critic learns before the policy, with an optimizer of its own."""
        return CriticFit(
            self.critic_learning_rate, self.critic_num_epochs, self.critic_batch_size, self.critic_max_grad_norm
        )
