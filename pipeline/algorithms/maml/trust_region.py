"""The meta-update within a trust region (TRPO, Schulman et al. 2015, arXiv:1502.05477), as a meta-update of MAML."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.maml.gradient_based import euclidean_norm, mean_over_tasks
from metaloom.pipeline.algorithms.maml.losses import likelihood_ratio_loss
from metaloom.pipeline.algorithms.maml.maml import MAML
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.optimizers import LineSearch, backtracking_line_search, conjugate_gradient, dot
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Params, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.curvature import FlatParams, HessianProduct
    from metaloom.pipeline.algorithms.maml.meta_gradient import MetaProblem, Objective, TaskValues
    from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows
    from metaloom.pipeline.policies.gaussian import GaussianPolicy

CONSTRAINT = "outer_kl"


class Trial(NamedTuple):
    """Parameters that the line search tried, and the objective's values there; none where they were not finite."""

    params: Params
    values: TaskValues


class TrustRegion(MAML):
    """The largest step along the natural gradient that keeps the mean KL after adaptation within a bound."""

    max_kl: float = Field(default=0.01, gt=0)
    """Bound δ of the mean KL, after adaptation, between the policies that acted and the updated ones, in nats."""
    cg_iterations: int = Field(default=10, ge=1)
    """Hessian-vector products at most."""
    cg_tolerance: float = Field(default=1e-10, ge=0)
    """Squared norm of the residual at which conjugate gradient stops."""
    cg_damping: float = Field(default=1e-5, ge=0)
    """Multiple of the identity that is added to the Hessian."""
    backtrack_ratio: float = Field(default=0.8, gt=0, lt=1)
    """Each trial of the line search is this fraction of the one before."""
    line_search_trials: int = Field(default=15, ge=1)
    """Trials at most; the first is the full step."""
    hvp: Literal["exact", "finite_difference", "fd_unscaled"] = "exact"
    """Hessian-vector products: exact, or central differences of the KL's gradient: in float64 with a step scaled to the
    vector, or in float32 with an absolute step of 1e-5, as in the ProMP code."""
    hvp_subsample: float = Field(default=1.0, gt=0, le=1)
    """Share of each task's steps, in every round, that Hessian-vector products are computed from."""
    kl_order: Literal["old_new", "new_old"] = "old_new"
    """Whether the bound is on KL(acted ‖ updated) or, as in some other code, on KL(updated ‖ acted)."""

    @model_validator(mode="after")
    def _trust_region_settings_agree(self) -> TrustRegion:
        if self.trainable_inner_lr:
            raise ValueError(
                "trainable_inner_lr is on, but the trust region measures changes of the policy and step sizes are not "
                "part of it; turn it off, or use maml-vpg or promp, which train step sizes with Adam"
            )
        if self.first_order and self.hvp != "exact":
            raise ValueError(
                f"first_order is on and hvp is {self.hvp}: differences of a first-order gradient are not symmetric, "
                "which conjugate gradient needs; use hvp=exact"
            )
        return self

    def initialize(self, policy: GaussianPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration; there is no state of an optimizer."""
        params, extra = self.initial_params(policy, run_seed)
        return LearnerState(params, {}, extra)

    def surrogate(self, adapted: DiagGaussian, rows: TaskRows) -> Tensor:
        """The likelihood-ratio loss after adaptation, whatever the inner loss, for every task: [b]."""
        return likelihood_ratio_loss(adapted, rows)

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The surrogate, the exploration term when it is on, and the KLs, the outer one in the order of kl_order."""
        objective = super().objective(learner, steps)
        if self.kl_order == "old_new":
            return objective

        def reversed_kl(current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
            return objective(current, chunk) | {CONSTRAINT: self.constraint(current, chunk)["loss"].detach()}

        return reversed_kl

    def constraint(self, current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
        """The KL that is bounded, as `loss`, with its gradient."""
        adapted, rows = current[-1], chunk.rounds[-1]
        kl = rows.behavior.kl(adapted) if self.kl_order == "old_new" else adapted.kl(rows.behavior)
        return {"loss": rows.mean(kl)}

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
        """One step within the trust region, or none; see Algorithm."""
        from metaloom.pipeline.algorithms.maml.curvature import FlatParams
        from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
        from metaloom.pipeline.algorithms.maml.rows import build_chunks

        self.require_all_rounds(steps)
        problem, params = self.problem(policy, learner, steps), learner.params
        chunks = build_chunks(steps, self.tasks_per_chunk, parallel=parallel)
        gradients, before = meta_gradient(problem, params, chunks, parallel=parallel)
        flat = FlatParams(params, policy.learned(params))
        rng = generator(run_seed, "minibatches", iteration, 0)
        product = self._hessian_product(problem, params, flat, self._product_chunks(steps, chunks, rng), parallel)
        full_step, metrics = self._full_step(product, flat.pack(gradients))
        evaluate = partial(meta_objective, problem, chunks=chunks, parallel=parallel)
        search = self._line_search(params, before, flat.unpack(full_step), evaluate)
        # What a rejected step leaves are the very same arrays.
        updated, after = (search.value.params, search.value.values) if search.accepted else (params, before)
        metrics |= self.update_metrics(learner, updated, before, after)
        metrics |= {
            "outer_kl_before": mean_over_tasks(before[CONSTRAINT]),
            "meta_gradient_norm": euclidean_norm(gradients),
            "line_search_trials": float(search.trials),
            "step_accepted": float(search.accepted),
        }
        return self.next_learner(learner, updated, learner.optimizer, after), metrics

    def _product_chunks(self, steps: Sequence[Step], chunks: list[Chunk], rng: np.random.Generator) -> list[Chunk]:
        import torch

        from metaloom.pipeline.algorithms.maml.curvature import share_of_rows
        from metaloom.pipeline.algorithms.maml.rows import build_chunks

        if self.hvp_subsample == 1 and self.hvp != "finite_difference":
            return chunks
        rows = None
        if self.hvp_subsample < 1:
            masks = [step.samples.mask.reshape(len(step.samples.mask), -1) for step in steps]
            rows = [share_of_rows(mask, self.hvp_subsample, rng) for mask in masks]
        dtype = torch.float64 if self.hvp == "finite_difference" else torch.float32
        return build_chunks(steps, self.tasks_per_chunk, rows, dtype=dtype)

    def _hessian_product(
        self, problem: MetaProblem, params: Params, flat: FlatParams, chunks: list[Chunk], parallel: ParallelMap
    ) -> HessianProduct:
        from metaloom.pipeline.algorithms.maml.curvature import difference_product, exact_product

        if self.hvp == "exact":
            return exact_product(problem, params, flat, chunks, parallel=parallel)
        scaled = self.hvp == "finite_difference"
        return difference_product(problem, params, flat, chunks, self.constraint, scaled=scaled, parallel=parallel)

    def _full_step(self, product: HessianProduct, gradient: Array) -> tuple[Array, Metrics]:
        """The step that has a KL of max_kl by the quadratic model; zero where the model has no positive curvature."""
        solution = conjugate_gradient(
            lambda v: product(v) + self.cg_damping * v,
            gradient,
            iterations=self.cg_iterations,
            tolerance=self.cg_tolerance,
        )
        metrics = {
            "cg_iterations": float(solution.iterations),
            "cg_residual": math.sqrt(dot(solution.residual, solution.residual)),
        }
        # xᵀ H x from the residual g - H x, which spares one more product.
        curvature = dot(solution.x, gradient - solution.residual)
        if not curvature > 0:
            return np.zeros_like(gradient), metrics
        return -math.sqrt(2 * self.max_kl / (curvature + 1e-8)) * solution.x, metrics

    def _line_search(
        self, params: Params, before: TaskValues, full_step: Params, evaluate: Callable[[Params], TaskValues]
    ) -> LineSearch[Trial]:
        from metaloom.pipeline.algorithms.finite_checks import NumericalError

        def trial(fraction: float) -> Trial:
            moved = {
                name: (params[name] + fraction * step).astype(params[name].dtype) for name, step in full_step.items()
            }
            try:
                return Trial(params | moved, evaluate(params | moved))
            except NumericalError:
                return Trial(params, {})

        def accept(made: Trial) -> bool:
            if not made.values:
                return False
            falls = mean_over_tasks(made.values["loss"]) < mean_over_tasks(before["loss"])
            return falls and mean_over_tasks(made.values[CONSTRAINT]) <= self.max_kl

        if not any(step.any() for step in full_step.values()):
            return LineSearch(False, Trial(params, before), 0)
        return backtracking_line_search(trial, accept, ratio=self.backtrack_ratio, max_trials=self.line_search_trials)
