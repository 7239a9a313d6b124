"""What all algorithms that adapt by gradient steps have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.maml.losses import INNER_KL
from metaloom.pipeline.schema import Settings
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Params, Step, TaskParams

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import MetaProblem, Objective, TaskValues
    from metaloom.pipeline.algorithms.maml.rows import TaskRows
    from metaloom.pipeline.nn.distributions import DiagGaussian
    from metaloom.pipeline.policies.gaussian import GaussianPolicy

LOG_INNER_LR = "log_inner_lr."
"""Prefix of trainable inner step sizes: log α of every inner step and element, [K, ...]."""

NUM_UPDATES = "num_updates"
"""Name of the count of meta-updates so far."""


class GradientBased(Settings, ABC):
    """Adaptation by plain gradient steps on each task's own samples."""

    learns_from: ClassVar[tuple[str, ...]] = ("advantages",)
    """Fields of Samples in the losses; they decide what process_samples has to give."""

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
    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """What the adaptation minimizes, for every task: [b]."""

    @abstractmethod
    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """What the meta-update minimizes, as a function of the policy's distributions along the adaptation.

        Args:
            learner: input of the iteration.
            steps: its samples, for what an objective needs to know of all tasks at once.
        """

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
        from metaloom.pipeline.algorithms.maml.inner_loop import adapt_tasks

        return adapt_tasks(
            policy,
            params,
            step,
            self._step_size(learner, step.k),
            self.adaptation_loss,
            tasks_per_chunk=self.tasks_per_chunk,
            parallel=parallel,
        )

    def problem(self, policy: GaussianPolicy, learner: LearnerState, steps: Sequence[Step]) -> MetaProblem:
        """What is differentiated in this iteration."""
        from metaloom.pipeline.algorithms.maml.meta_gradient import MetaProblem

        return MetaProblem(
            policy, self.adaptation_loss, self.inner_lr, self.first_order, self.objective(learner, steps)
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

    def next_learner(
        self, learner: LearnerState, meta_params: Mapping[str, Array], optimizer: Params, after: TaskValues
    ) -> LearnerState:
        """The learner of the next iteration.

        Args:
            learner: input of this iteration.
            meta_params: after the update.
            optimizer: its state after the update.
            after: the objective's values at these meta-parameters.
        """
        del after
        extra = learner.extra | step_size_logs(meta_params)
        extra[NUM_UPDATES] = np.array(learner.extra[NUM_UPDATES] + 1)
        return LearnerState({name: meta_params[name] for name in learner.params}, optimizer, extra)

    def update_metrics(
        self, learner: LearnerState, meta_params: Mapping[str, Array], before: TaskValues, after: TaskValues
    ) -> Metrics:
        """The loss before and after the update, and all else that the objective gives, after it."""
        del learner
        metrics = {"loss_before": mean_over_tasks(before["loss"]), "loss_after": mean_over_tasks(after["loss"])}
        for name, value in after.items():
            if name != "loss" and not name.startswith(INNER_KL):
                metrics[name] = mean_over_tasks(value)
        if kls := inner_kls(after):
            metrics["inner_kl"] = float(np.mean(kls))
        if self.trainable_inner_lr:
            logs = np.concatenate([log.ravel() for log in step_size_logs(meta_params).values()])
            metrics["inner_lr"] = float(np.exp(logs, dtype=np.float64).mean())
        return metrics

    def require_all_rounds(self, steps: Sequence[Step]) -> None:
        """Refuse any samples but those of the rounds 0 ... inner_steps, in this order."""
        found, required = [step.k for step in steps], list(range(self.inner_steps + 1))
        if found != required:
            raise ValueError(f"meta_optimize: found samples of rounds {found}; required {required}, in this order")

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


def inner_kls(values: TaskValues) -> list[float]:
    """Mean over tasks of every `inner_kl_k`, for k = 0 ... K - 1."""
    return [mean_over_tasks(value) for name, value in values.items() if name.startswith(INNER_KL)]


def mean_over_tasks(values: Array) -> float:
    """Mean of a quantity of every task [B], in float64."""
    return float(values.mean(dtype=np.float64))


def euclidean_norm(gradients: Mapping[str, Array]) -> float:
    """Norm over all parameters together, in float64."""
    return math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
