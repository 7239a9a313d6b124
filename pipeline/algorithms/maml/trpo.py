"""MAML-TRPO and E-MAML: MAML with a meta-update within a trust region.

The bounded KL is from the behavior policies to the adapted policies θ_i^K(θ). The metric is the Gauss-Newton matrix

    G = mean_i J_iᵀ F_i J_i,    J_i = dθ_i^K / dθ = (I - α H_{i,K-1}) ... (I - α H_{i,0}),

where F_i is the Fisher matrix of the adapted policy and H_{i,k} the symmetric Hessian of the inner loss at θ_i^k. If
the adapted policies are the behavior policies, as in every training iteration, the KL and its gradient with respect to
the distributions are zero, and G is the Hessian of the KL with respect to θ. Otherwise, for example if an iteration is
recomputed with other settings, the Hessian has another term and may be indefinite. G is positive semi-definite and is
the metric of the natural gradient at θ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Kernel, NumericalError, Setup, Steps
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, fused, network_blockers
from metaloom.pipeline.algorithms.maml.learner import Draws, MetaLearner, MetaUpdate, mean_over_tasks, step_size_logs
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    INNER_LOSSES,
    LOSS,
    OUTER_KL,
    MetaProblem,
    Objective,
    TaskValues,
    likelihood_ratio_loss,
    meta_gradient,
    meta_leaves,
    meta_objective,
    objective_values,
    policy_kls,
)
from metaloom.pipeline.algorithms.maml.policy_gradient import with_exploration
from metaloom.pipeline.algorithms.maml.rows import Chunk, minibatch_rows
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLTRPO
from metaloom.pipeline.nn.distributions import Distribution, kl_from_itself
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.natural_steps import dot, natural_step, search
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, ParallelMap, Params

DIFFERENCE_STEP = 1e-5  # step ε of finite differences

Product = Callable[[Array], Array]  # function that multiplies a vector v [D] float64 by the metric


@dataclass(frozen=True)
class MetaPoint:
    """Meta-parameters θ, with the data for metric-vector products at θ."""

    problem: MetaProblem
    params: Mapping[str, Array]
    flat: FlatParams  # learned policy parameters as one vector [D]; step sizes are held constant
    chunks: Sequence[Chunk]
    parallel: ParallelMap = map

    @property
    def num_tasks(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


def gauss_newton_product(at: MetaPoint) -> Product:
    """Return v ↦ G v for the Gauss-Newton matrix G, with any network."""

    def kl(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
        return {LOSS: chunk.rounds[-1].mean(kl_from_itself(current[-1]))}

    return hessian_product(at, kl)


def hessian_product(at: MetaPoint, constraint: Objective) -> Product:
    """Return v ↦ H v = ∇(∇c · v) for the constraint's loss c. The graph is rebuilt for each product to bound memory."""
    problem, flat = replace(at.problem, objective=constraint), at.flat

    def product(v: Array) -> Array:
        direction = flat.views(v)

        def of_chunk(chunk: Chunk) -> Array:
            leaves = meta_leaves(problem, at.params, chunk)
            learned = [leaves.params[name] for name in flat.params]
            values = objective_values(problem, leaves, chunk, differentiable=not problem.first_order)
            gradients = torch.autograd.grad(values[LOSS].sum(), learned, create_graph=True)
            pairs = zip(flat.params, gradients, strict=True)
            along = torch.stack([(gradient * gradient.new_tensor(direction[name])).sum() for name, gradient in pairs])
            products = torch.autograd.grad(along.sum(), learned, materialize_grads=True)
            return flat.pack({name: p.sum(0).cpu().numpy() for name, p in zip(flat.params, products, strict=True)})

        return reduce(add, at.parallel(of_chunk, at.chunks)) / at.num_tasks

    return product


def difference_product(at: MetaPoint, constraint: Objective, *, scaled: bool) -> Product:
    """Return v ↦ (∇c(θ + ε v) - ∇c(θ - ε v)) / 2ε, which approximates H v, computed in the chunks' dtype.

    The step is ε = 1e-5 / ‖v‖ if `scaled`, otherwise 1e-5, as in the ProMP code.
    """
    problem, dtype = replace(at.problem, objective=constraint), chunk_dtype(at.chunks[0])

    def gradient(shift: Array) -> Array:
        moved = {name: value.astype(dtype) for name, value in at.params.items()}
        for name, change in at.flat.views(shift).items():
            moved[name] = moved[name] + change.astype(dtype)
        gradients, *_ = meta_gradient(problem, moved, at.chunks, parallel=at.parallel)
        return at.flat.pack(gradients)

    def product(v: Array) -> Array:
        epsilon = DIFFERENCE_STEP / max(math.sqrt(dot(v, v)), 1e-8) if scaled else DIFFERENCE_STEP
        return (gradient(epsilon * v) - gradient(-epsilon * v)) / (2 * epsilon)

    return product


def share_of_rows(mask: Array, share: float, rng: np.random.Generator) -> Array:
    """Return indices [b, n] of a random share of each task's real rows, rounded up, with padding rows last."""
    (order,) = minibatch_rows(mask, 1, rng)
    counts = np.ceil(np.arange(order.shape[1] + 1, dtype=np.int64) * share)
    return order[:, np.flatnonzero(np.diff(counts))]


def chunk_dtype(chunk: Chunk) -> np.dtype[Any]:
    """Return the NumPy dtype of a chunk's rows."""
    return np.dtype(np.float64 if chunk.rounds[0].weights.dtype == torch.float64 else np.float32)


def bounded_kl(current: Sequence[Distribution], chunk: Chunk, *, new_old: bool = False) -> dict[str, Tensor]:
    """Return the bounded KL as `loss`: KL(behavior ‖ updated) or, with `new_old`, KL(updated ‖ behavior)."""
    adapted, rows = current[-1], chunk.rounds[-1]
    return {LOSS: rows.mean(adapted.kl(rows.behavior) if new_old else rows.behavior.kl(adapted))}


class TrustRegionLearner(MetaLearner):
    """Learner for MAML-TRPO and E-MAML: the likelihood-ratio loss after adaptation, within a trust region.

    An update takes the longest line-search step that lowers the loss and keeps the KL within its bound, or no step.
    """

    def __init__(self, settings: MAMLTRPO | EMAML, setup: Setup) -> None:
        super().__init__(settings, setup, INNER_LOSSES[settings.inner_loss])
        self._settings, network = settings, self.policy.network.spec
        if setup.device == "mps" and settings.hvp == "finite_difference":
            raise ConfigError(
                "algorithm.hvp is finite_difference, which computes in float64, but device is mps, which does not "
                "support it; use algorithm.hvp=gauss_newton"
            )
        blockers = [*network_blockers(network, device=setup.device)]
        if setup.policy.name is not None:
            blockers.append(f"policy is {setup.policy.name}")
        if settings.hvp != "gauss_newton":
            blockers.append(f"hvp is {settings.hvp}")
        how = f"plain {network.activation} network on the CPU"
        self.kernel: Kernel = choose_kernel(settings.kernel, blockers=blockers, fused=how)
        is_fused = self.kernel.name == "fused"
        self._gauss_newton_product = fused(gauss_newton_product) if is_fused else gauss_newton_product

    def objective(self, state: LearnerState, steps: Steps) -> Objective:

        def objective(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
            values = {LOSS: likelihood_ratio_loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}
            if self._settings.kl_order == "new_old":
                values[OUTER_KL] = bounded_kl(current, chunk, new_old=True)[LOSS].detach()
            return values

        return with_exploration(objective, self._settings, steps)

    def minimize(self, state: LearnerState, steps: Steps, *, draws: Draws, parallel: ParallelMap = map) -> MetaUpdate:
        """Solve G x = g, scale x to a KL of max_kl in the quadratic model, and run a line search along x."""
        settings, problem = self._settings, self.problem(state, steps)
        meta_params, chunks = state.params | step_size_logs(state.extra), self.chunks(steps, parallel=parallel)
        gradients, before, measured = meta_gradient(
            problem, meta_params, chunks, noise=settings.gradient_noise, parallel=parallel
        )
        flat = FlatParams({name: meta_params[name] for name in problem.policy.learned(meta_params)})
        product = self._product(MetaPoint(problem, meta_params, flat, chunks, parallel), steps, draws)
        full_step, metrics = natural_step(product, flat.pack(gradients), settings)

        def evaluate(params: Params) -> TaskValues | None:
            try:
                return meta_objective(problem, params, chunks=chunks, parallel=parallel)
            except NumericalError:
                return None

        def accept(after: TaskValues) -> bool:
            falls = mean_over_tasks(after[LOSS]) < mean_over_tasks(before[LOSS])
            return falls and mean_over_tasks(after[OUTER_KL]) <= settings.max_kl

        found, searched = search(meta_params, flat.views(full_step), evaluate, accept, settings)
        # A rejected step returns the same arrays.
        updated, after = (meta_params, before) if found is None or found.value is None else (found.params, found.value)
        metrics |= {"outer_kl_before": mean_over_tasks(before[OUTER_KL]), **measured, **searched}
        return MetaUpdate(updated, state.optimizer, before, after, metrics)

    def _product(self, at: MetaPoint, steps: Steps, draws: Draws) -> Product:
        """Return the configured metric-vector product, computed from the configured share of rows."""
        hvp, share, rows = self._settings.hvp, self._settings.hvp_subsample, None
        if share < 1:
            rng = draws(0)
            masks = [step.samples.mask.reshape(len(step.samples.mask), -1) for step in steps]
            rows = [share_of_rows(mask, share, rng) for mask in masks]
        if rows is not None or hvp == "finite_difference":
            dtype = torch.float64 if hvp == "finite_difference" else torch.float32
            at = replace(at, chunks=self.chunks(steps, rows=rows, dtype=dtype, parallel=at.parallel))
        if hvp == "gauss_newton":
            return self._gauss_newton_product(at)
        constraint = partial(bounded_kl, new_old=self._settings.kl_order == "new_old")
        if hvp == "hessian":
            return hessian_product(at, constraint)
        return difference_product(at, constraint, scaled=hvp == "finite_difference")
