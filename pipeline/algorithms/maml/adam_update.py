"""The meta-update by Adam, shared by all algorithms but those with a trust region."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.maml.gradient_based import (
    GradientBased,
    euclidean_norm,
    mean_over_tasks,
    step_size_logs,
)
from metaloom.pipeline.nn.optimizers import Adam
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, ParallelMap, Step

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.maml.meta_gradient import TaskValues
    from metaloom.pipeline.algorithms.maml.rows import Chunk
    from metaloom.pipeline.policies.gaussian import GaussianPolicy


class AdamUpdate(GradientBased):
    """Adam on the meta-loss, in epochs over the samples of one iteration."""

    outer_lr: float = Field(default=1e-3, gt=0)
    """Step size of Adam on the meta-parameters."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the samples of an iteration."""
    num_minibatches: int = Field(default=1, ge=1)
    """Adam steps per epoch, each on its own share of the steps of every task and round."""
    tolerance: float | None = Field(default=None, gt=0)
    """Skip the remaining epochs once an epoch has changed the meta-loss of all samples by less than this."""

    @model_validator(mode="after")
    def _tolerance_can_act(self) -> AdamUpdate:
        if self.tolerance is not None and self.num_epochs == 1:
            raise ValueError(
                f"tolerance is {self.tolerance} but num_epochs is 1, so there is no epoch to skip; "
                "raise num_epochs or leave tolerance out"
            )
        return self

    def initialize(self, policy: GaussianPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration."""
        params, extra = self.initial_params(policy, run_seed)
        learned = {name: params[name] for name in policy.learned(params)} | step_size_logs(extra)
        return LearnerState(params, Adam(self.outer_lr).initialize(learned), extra)

    def optimize(
        self,
        policy: GaussianPolicy,
        learner: LearnerState,
        steps: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Adam on the meta-objective over the samples of one iteration; see Algorithm."""
        from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
        from metaloom.pipeline.algorithms.maml.rows import build_chunks

        self.require_all_rounds(steps)
        problem, adam = self.problem(policy, learner, steps), Adam(self.outer_lr)
        meta_params, state = learner.params | step_size_logs(learner.extra), learner.optimizer
        everything = build_chunks(steps, self.tasks_per_chunk, parallel=parallel)
        evaluate = partial(meta_objective, problem, chunks=everything, parallel=parallel)
        before: TaskValues = {}
        after: TaskValues = {}
        gradient_norm, epoch = math.nan, 0
        for epoch in range(self.num_epochs):
            rng = generator(run_seed, "minibatches", iteration, epoch)
            for chunks in self._minibatches(steps, everything, rng, parallel):
                gradients, values = meta_gradient(problem, meta_params, chunks, parallel=parallel)
                if not before:
                    before = values if chunks is everything else evaluate(meta_params)
                    gradient_norm = euclidean_norm(gradients)
                meta_params, state = adam.step(meta_params, gradients, state)
            if self.tolerance is not None:
                last, after = after or before, evaluate(meta_params)
                if abs(mean_over_tasks(after["loss"]) - mean_over_tasks(last["loss"])) < self.tolerance:
                    break
        after = after or evaluate(meta_params)
        metrics = self.update_metrics(learner, meta_params, before, after) | {"meta_gradient_norm": gradient_norm}
        if self.tolerance is not None:
            metrics["epochs"] = epoch + 1.0
        return self.next_learner(learner, meta_params, state, after), metrics

    def _minibatches(
        self, steps: Sequence[Step], everything: list[Chunk], rng: np.random.Generator, parallel: ParallelMap
    ) -> Iterator[list[Chunk]]:
        from metaloom.pipeline.algorithms.maml.rows import build_chunks, minibatches

        if self.num_minibatches == 1:
            yield everything
            return
        rounds = [minibatches(step.samples, self.num_minibatches, rng) for step in steps]
        for rows in zip(*rounds, strict=True):
            yield build_chunks(steps, self.tasks_per_chunk, rows, parallel=parallel)
