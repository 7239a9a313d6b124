"""Products of vectors with the metric of the trust region, which bounds the mean KL after adaptation.

The bounded KL is that between the policies that acted and the policies θ_i^K(θ). The metric is the Gauss-Newton matrix

    G = mean_i J_iᵀ F_i J_i,    J_i = dθ_i^K / dθ = (I - α H_{i,K-1}) ... (I - α H_{i,0}),

with F_i the Fisher matrix of the adapted policy and H_{i,k} the symmetric Hessian of the inner loss at θ_i^k. Where the
adapted policies are those that acted, as in every iteration of training, the KL and its gradient in the distributions
are zero, and G is the KL's Hessian in θ. Elsewhere, as when an iteration is computed again with other settings, the
Hessian has a term more and need not be positive; G is, and is the metric of the natural gradient at θ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.maml.losses import LOSS
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    MetaProblem,
    Objective,
    meta_gradient,
    meta_leaves,
    objective_values,
    sum_in_order,
)
from metaloom.pipeline.algorithms.maml.rows import Chunk, minibatch_rows
from metaloom.pipeline.nn.distributions import Distribution, kl_from_itself
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.optimizers import dot
from metaloom.pipeline.types import Array, ParallelMap

DIFFERENCE_STEP = 1e-5
"""ε of finite differences."""

Product = Callable[[Array], Array]
"""The metric times v, for v [D] float64."""


@dataclass(frozen=True)
class MetaPoint:
    """The meta-parameters at which products are taken.

    Attributes:
        problem: how a policy adapts; its step sizes are numbers, not meta-parameters.
        params: θ.
        flat: the order of a vector's elements.
        chunks: rows of all tasks.
        parallel: maps over the chunks.
    """

    problem: MetaProblem
    params: Mapping[str, Array]
    flat: FlatParams
    chunks: Sequence[Chunk]
    parallel: ParallelMap = map

    @property
    def num_tasks(self) -> int:
        """Tasks in all chunks."""
        return sum(len(chunk) for chunk in self.chunks)


def gauss_newton_product(at: MetaPoint) -> Product:
    """G v: the Hessian of the KL of the adapted policies from themselves, of any network. See hessian_product."""
    return hessian_product(at, _kl_from_itself)


def hessian_product(at: MetaPoint, constraint: Objective) -> Product:
    """H v by differentiating twice, ∇(∇c · v). The graph is built anew for every product, which bounds the memory.

    Args:
        at: where.
        constraint: c, as its `loss`.
    """
    # What goes to workers must not hold all chunks.
    problem, params, flat = replace(at.problem, objective=constraint), at.params, at.flat

    def product(v: Array) -> Array:
        direction = flat.views(v)

        def of_chunk(chunk: Chunk) -> Array:
            leaves = meta_leaves(problem, params, chunk)
            learned = [leaves[name] for name in flat.params]
            values = objective_values(problem, leaves, chunk, differentiable=not problem.first_order)
            gradients = torch.autograd.grad(values[LOSS].sum(), learned, create_graph=True)
            pairs = zip(flat.params, gradients, strict=True)
            along = torch.stack([(gradient * gradient.new_tensor(direction[name])).sum() for name, gradient in pairs])
            products = torch.autograd.grad(along.sum(), learned, materialize_grads=True)
            return flat.pack({name: p.sum(0).cpu().numpy() for name, p in zip(flat.params, products, strict=True)})

        return sum_in_order(list(at.parallel(of_chunk, at.chunks))) / at.num_tasks

    return product


def difference_product(at: MetaPoint, constraint: Objective, *, scaled: bool) -> Product:
    """H v from central differences of the constraint's gradient, (∇c(θ + ε v) - ∇c(θ - ε v)) / 2ε.

    Args:
        at: where; differences are taken in the dtype of the chunks.
        constraint: c, as its `loss`.
        scaled: whether ε is 1e-5 / ‖v‖, or 1e-5 as in the ProMP code.
    """
    problem = replace(at.problem, objective=constraint)
    (dtype,) = at.parallel(_dtype, at.chunks[:1])

    def gradient(shift: Array) -> Array:
        moved = {name: value.astype(dtype) for name, value in at.params.items()}
        for name, change in at.flat.views(shift).items():
            moved[name] = moved[name] + change.astype(dtype)
        gradients, _ = meta_gradient(problem, moved, at.chunks, parallel=at.parallel)
        return at.flat.pack(gradients)

    def product(v: Array) -> Array:
        epsilon = DIFFERENCE_STEP / max(math.sqrt(dot(v, v)), 1e-8) if scaled else DIFFERENCE_STEP
        return (gradient(epsilon * v) - gradient(-epsilon * v)) / (2 * epsilon)

    return product


def share_of_rows(mask: Array, share: float, rng: np.random.Generator) -> Array:
    """A random share of each task's real rows, rounded up: indices [b, n]; padding rows come last.

    Args:
        mask: [b, N].
        share: from 0, excluded, to 1.
        rng: draws one number per row, padding included.
    """
    (order,) = minibatch_rows(mask, 1, rng)
    counts = np.ceil(np.arange(order.shape[1] + 1, dtype=np.int64) * share)
    return order[:, np.flatnonzero(np.diff(counts))]


def _dtype(chunk: Chunk) -> np.dtype[Any]:
    return np.dtype(np.float64 if chunk.rounds[0].weights.dtype == torch.float64 else np.float32)


def _kl_from_itself(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
    return {LOSS: chunk.rounds[-1].mean(kl_from_itself(current[-1]))}
