"""Settings that algorithms with a replay memory have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from metaloom.pipeline.nn.optimization import LearningRate
from metaloom.pipeline.policies.config import ActorKind

LayerSize = Annotated[int, Field(ge=1)]


class OffPolicy(LearningRate):
    """What is remembered, and how many gradient steps follow new experience."""

    off_policy: ClassVar[bool] = True
    has_critic: ClassVar[bool] = False
    inner_steps: ClassVar[int] = 0
    learns_from: ClassVar[tuple[str, ...]] = ()
    actor: ClassVar[ActorKind]
    sizes: ClassVar[tuple[str, ...]] = ("batch_size", "num_updates_per_step")
    """Settings that decide the shapes of what an iteration stores."""
    decides_episodes: ClassVar[tuple[str, ...]] = ("num_init_memory_steps", "use_trained_policy_for_refill")
    """Settings that decide which episodes are collected, and nothing else."""

    memory_size: int = Field(default=100_000, ge=1)
    """Environment steps that are remembered, the last ones."""
    num_init_memory_steps: int | None = Field(default=None, ge=1)
    """Environment steps before the first update, at least batch_size and at most memory_size; left out, memory_size."""
    use_trained_policy_for_refill: bool = False
    """In a run that starts with the parameters of another (init_from): that policy fills the memory, not chance."""
    batch_size: int = Field(default=256, ge=1)
    """Remembered steps per gradient step."""
    num_updates_per_step: int | None = Field(default=None, ge=1)
    """Gradient steps per iteration; left out, as many as the iteration had environment steps."""
    target_update_intvl: int = Field(default=1, ge=1)
    """Gradient steps from one change of the target networks to the next, counted over the run."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Longer gradients are shortened to this Euclidean norm."""

    @model_validator(mode="after")
    def _a_batch_fits_into_the_memory(self) -> OffPolicy:
        if self.memory_size < self.batch_size:
            raise ValueError(
                f"memory_size is {self.memory_size} but batch_size is {self.batch_size}, which would repeat what is "
                "remembered; raise memory_size or lower batch_size"
            )
        return self

    @property
    def init_memory_steps(self) -> int:
        """Environment steps before the first update."""
        if self.num_init_memory_steps is None:
            return self.memory_size
        return max(min(self.num_init_memory_steps, self.memory_size), self.batch_size)

    def gradient_steps(self, num_env_steps: int) -> int:
        """Gradient steps of an iteration that had so many environment steps."""
        return num_env_steps if self.num_updates_per_step is None else self.num_updates_per_step
