"""Advantage actor-critic (A2C), the synchronous form of Mnih et al. 2016, arXiv:1602.01783."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.schema import later


class A2C(ActorCritic):
    """One pass of policy gradient and critic regression over every iteration's steps, by RMSprop."""

    name: Literal["a2c"] = "a2c"

    num_epochs: Literal[1] = 1
    """One: a second pass would follow the gradient of a policy that no longer acts."""
    batch_size: int = Field(default=32, ge=1)
    """Environment steps per gradient step; an epoch's steps are dealt into equal parts of at most so many."""
    entropy_coeff: float = Field(default=1e-3, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    value_target: Literal["td_lambda", "empirical"] = "empirical"
    """Targets of the critic: its own values plus advantages, or the discounted returns that were observed."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the critic's loss."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Of the policy and, with a state of its own, of the critic; adam and rmsprop have an ε of 1e-5 unless set."""

    @property
    def critic_weight(self) -> float:
        return self.value_coeff
