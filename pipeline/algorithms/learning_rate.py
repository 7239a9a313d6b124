"""A step size and how it changes in the course of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings


class LearningRate(Settings):
    """Settings of algorithms whose optimizers have one step size, which may fall from iteration to iteration."""

    learning_rate: float = Field(default=5e-4, gt=0)
    """Step size of the policy's optimizer."""
    lr_schedule: Literal["constant", "linear", "exponential"] = "constant"
    """How step sizes change from iteration to iteration."""
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    """With lr_schedule=exponential: factor of step sizes per iteration."""
    lr_horizon: int | None = Field(default=None, ge=1)
    """With lr_schedule=linear: the iteration at which step sizes reach zero; learning ends there."""

    @model_validator(mode="after")
    def _schedule_has_what_it_needs(self) -> LearningRate:
        if (self.lr_horizon is not None) != (self.lr_schedule == "linear"):
            raise ValueError(
                f"lr_schedule is {self.lr_schedule} and lr_horizon is {self.lr_horizon}; required both lr_schedule "
                "linear and an lr_horizon, or neither"
            )
        if self.lr_decay != 1 and self.lr_schedule != "exponential":
            raise ValueError(f"lr_decay is {self.lr_decay} but lr_schedule is {self.lr_schedule}; leave lr_decay out")
        if self.lr_decay == 1 and self.lr_schedule == "exponential":
            raise ValueError(
                f"lr_schedule is exponential but lr_decay is {self.lr_decay}, which changes nothing; set lr_decay "
                "below 1 or leave lr_schedule out"
            )
        return self

    def lr_factor(self, num_updates: int) -> float:
        """What multiplies the step sizes in the iteration after so many updates."""
        if self.lr_schedule == "linear":
            assert self.lr_horizon is not None
            return max(0.0, 1 - num_updates / self.lr_horizon)
        return self.lr_decay**num_updates
