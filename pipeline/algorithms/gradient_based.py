"""What all algorithms that adapt by gradient steps have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from pipeline.algorithms.contract import ParallelMap
from pipeline.schema import Settings
from pipeline.seeding import generator
from pipeline.types import Array, LearnerState, Params, Step, TaskParams

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algorithms.rows import TaskRows
    from pipeline.distributions import DiagGaussian
    from pipeline.policies.gaussian import GaussianPolicy

LOG_INNER_LR = "log_inner_lr."
"""Prefix of trainable inner step sizes: log α of every inner step and element, [K, ...]."""

NUM_UPDATES = "num_updates"
"""Name of the count of meta-updates so far."""


class GradientBased(Settings, ABC):
    """Adaptation by plain gradient steps on each task's own samples."""

    inner_lr: float = Field(default=0.1, gt=0)
    """Step size of the inner gradient steps; with trainable_inner_lr, where training starts from."""
    inner_steps: int = Field(default=1, ge=0)
    """Gradient steps of the adaptation; 0 is single-task learning on all tasks at once."""
    trainable_inner_lr: bool = False
    """Meta-learn a step size for every parameter element and inner step (Meta-SGD, Li et al. 2017)."""
    first_order: bool = False
    """Treat the inner gradients as constants in the meta-gradient."""
    tasks_per_chunk: int = Field(default=2, ge=1)
    """Tasks computed at once. Decides memory and the order of sums, so the last bits of results depend on it."""

    @model_validator(mode="after")
    def _inner_settings_agree(self) -> GradientBased:
        for name in ("trainable_inner_lr", "first_order"):
            if getattr(self, name) and self.inner_steps == 0:
                raise ValueError(f"{name} is on but inner_steps is 0, so there is no inner step; turn it off")
        return self

    @abstractmethod
    def inner_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """What the adaptation minimizes, for every task: [b]."""

    def adapt(
        self,
        policy: GaussianPolicy,
        learner: LearnerState,
        params: TaskParams,
        step: Step,
        *,
        parallel: ParallelMap = map,
    ) -> TaskParams:
        """Parameters of every task after inner step `step.k` on its own samples; see Algorithm."""
        # Imported here, since reading a configuration must not cost the import of torch.
        from pipeline.algorithms.inner_loop import adapt_tasks

        return adapt_tasks(
            policy,
            params,
            step,
            self._step_size(learner, step.k),
            self.inner_loss,
            tasks_per_chunk=self.tasks_per_chunk,
            parallel=parallel,
        )

    def initial_params(self, policy: GaussianPolicy, run_seed: int) -> tuple[Params, Params]:
        """Policy parameters, and what else the family keeps: the update count and trainable step sizes."""
        params = policy.initialize(generator(run_seed, "initialize"))
        extra: Params = {NUM_UPDATES: np.zeros((), np.int64)}
        if self.trainable_inner_lr:
            for name in policy.learned(params):
                shape = (self.inner_steps, *params[name].shape)
                extra[LOG_INNER_LR + name] = np.full(shape, np.log(self.inner_lr), np.float32)
        return params, extra

    def _step_size(self, learner: LearnerState, k: int) -> dict[str, Array] | float:
        if not 0 <= k < self.inner_steps:
            raise ValueError(
                f"adapt: found samples of round {k}; inner_steps={self.inner_steps} adapts on rounds below it"
            )
        logs = step_size_logs(learner.extra)
        return {name.removeprefix(LOG_INNER_LR): np.exp(log[k]) for name, log in logs.items()} or self.inner_lr


def step_size_logs(arrays: Mapping[str, Array]) -> Params:
    """The trainable step sizes among some arrays: log α by full name; empty when they are not trained."""
    return {name: value for name, value in arrays.items() if name.startswith(LOG_INNER_LR)}
