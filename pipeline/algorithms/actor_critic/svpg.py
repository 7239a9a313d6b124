"""Stein variational policy gradient (SVPG). Liu et al. 2017, arXiv:1704.02399: particles that learn and keep apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.algorithms.actor_critic.settings import A2C, RUN_DEFAULTS, ActorCritic
from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.plugins import ByName


class SVPG(AlgorithmSettings):
    """Several policies, each with a critic of its own, whose parameters are drawn towards good returns and apart."""

    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.actor_critic.stein:SVPGLearner"

    name: Literal["svpg"] = "svpg"

    particle: Annotated[ActorCritic, ByName(ALGORITHMS, ActorCritic)] = A2C()
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

    @model_validator(mode="after")
    def _one_kernel_for_all(self) -> SVPG:
        if self.particle.kernel != "auto":
            raise ValueError(
                f"particle.kernel is {self.particle.kernel}; set algorithm.kernel, which is for all particles"
            )
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """See RUN_DEFAULTS; particles take the places of tasks."""
        return {**RUN_DEFAULTS, "num_tasks": self.num_particles}

    @property
    def num_policies(self) -> int:
        return self.num_particles

    def problems(self, run: RunSettings) -> Iterator[str]:
        """Tell what does not fit particles with critics; see AlgorithmSettings."""
        yield from self.particle.problems_of(self.name, run)
        if run.num_tasks != self.num_particles:
            yield (
                f"num_tasks is {run.num_tasks} but algorithm.num_particles is {self.num_particles}, and particles take "
                "the places of tasks; leave num_tasks out"
            )
