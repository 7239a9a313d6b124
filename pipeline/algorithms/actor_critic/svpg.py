"""Stein variational policy gradient (SVPG). Liu et al. 2017, arXiv:1704.02399: particles that learn and keep apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from metaloom.pipeline.algorithms.actor_critic.a2c import A2C
from metaloom.pipeline.algorithms.actor_critic.ppo import PPO
from metaloom.pipeline.algorithms.actor_critic.ppo2 import PPO2
from metaloom.pipeline.algorithms.actor_critic.settings import RUN_DEFAULTS
from metaloom.pipeline.schema import Settings

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.actor_critic.stein import SVPGLearner
    from metaloom.pipeline.estimation.config import ProcessingConfig


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class SVPG(Settings):
    """Several policies, each with a critic of its own, whose parameters are drawn towards good returns and apart."""

    inner_steps: ClassVar[int] = 0
    learns_from: ClassVar[tuple[str, ...]] = ("advantages",)
    has_critic: ClassVar[bool] = True

    name: Literal["svpg"] = "svpg"

    particle: Annotated[Annotated[A2C | PPO | PPO2, Field(discriminator="name")], BeforeValidator(_by_name)] = A2C()
    """The algorithm of a particle, with its options; a bare name stands for its defaults."""
    num_particles: int = Field(default=4, ge=1)
    """Policies; they take the places of the tasks, so num_tasks is the same number."""
    temperature: float = Field(default=1.0, gt=0)
    """Near 0 particles follow their own policy gradients; the larger, the more they keep apart."""
    temperature_decay: float = Field(default=1.0, gt=0, le=1)
    """Multiplies the temperature after every iteration."""
    prior_std: float | None = Field(default=None, gt=0)
    """Standard deviation of a Gaussian prior of all parameters around 0; none is a flat prior."""
    horizon: int | None = Field(default=None, ge=1)
    """Every so many iterations all particles start afresh, critics and optimizers included."""

    @model_validator(mode="after")
    def _particles_share_nothing_else(self) -> SVPG:
        if self.particle.advantage_scaling == "running":
            raise ValueError("particle.advantage_scaling is running, but particles have no steps in common; use batch")
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """What a run means by leaving a setting out."""
        return {**RUN_DEFAULTS, "num_tasks": self.num_particles}

    def build(self, processing: ProcessingConfig) -> SVPGLearner:
        """The algorithm that these settings describe, for rewards discounted as `processing` says."""
        from metaloom.pipeline.algorithms.actor_critic.stein import SVPGLearner

        return SVPGLearner(self.particle, processing, self)
