"""Deep Q-learning (DQL). Mnih et al. 2015, doi:10.1038/nature14236."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.off_policy.settings import ReplaySettings
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.schema import later


class DQL(ReplaySettings):
    """A Q-function of every discrete action, the best of which is taken except where chance decides."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.off_policy.dql_learner:DQLLearner"
    actor: ClassVar[ActorKind] = "q_values"
    decides_episodes: ClassVar[tuple[str, ...]] = (
        *ReplaySettings.decides_episodes,
        "eps_init",
        "eps_final",
        "eps_schedule_gamma",
    )

    name: Literal["dql"] = "dql"

    learning_rate: float = Field(default=5e-4, gt=0)
    """Step size of the optimizer."""
    target_update_intvl: int = Field(default=5, ge=1)
    """Gradient steps from one copy of the Q-function to the target network to the next, counted over the run."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Longer gradients are shortened to this Euclidean norm."""
    eps_init: float = Field(default=1.0, ge=0, le=1)
    """Probability ε that chance decides, in the first iteration."""
    eps_final: float = Field(default=0.05, ge=0, le=1)
    """Lower limit of ε."""
    eps_schedule_gamma: float = Field(default=0.99, gt=0, lt=1)
    """Factor per iteration of what ε is above eps_final."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Of the Q-function; adam and rmsprop have an ε of 1e-5."""

    @model_validator(mode="after")
    def _epsilon_does_not_rise(self) -> DQL:
        if self.eps_final > self.eps_init:
            raise ValueError(
                f"eps_final is {self.eps_final} but eps_init is {self.eps_init}; use eps_final <= eps_init"
            )
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {**super().run_defaults, "env": {"action_scale": None}}

    def epsilon(self, num_updates: int) -> float:
        """Probability that chance decides in the iteration after so many updates."""
        return self.eps_final + (self.eps_init - self.eps_final) * self.eps_schedule_gamma**num_updates
