"""Products of vectors with the Hessian of the trust region's constraint.

The constraint is the mean KL, after adaptation, between the policies that acted and the policies θ_i^K(θ). Where they
are the same, as in every iteration of training, the KL and its gradient are zero, so its Hessian in θ is exactly

    H = mean_i J_iᵀ F_i J_i,    J_i = dθ_i^K / dθ = (I - α H_{i,K-1}) ... (I - α H_{i,0}),

with F_i the Fisher matrix of the adapted policy and H_{i,k} the symmetric Hessian of the inner loss at θ_i^k.
Elsewhere, as when an iteration is computed again with other settings, this is still the metric of the natural gradient,
which is positive where the Hessian of the KL need not be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from metaloom.pipeline.algorithms.finite_checks import require_finite
from metaloom.pipeline.algorithms.maml.inner_loop import InnerLoss
from metaloom.pipeline.algorithms.maml.meta_gradient import MetaProblem, Objective, meta_gradient, sum_in_order
from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows, minibatch_rows
from metaloom.pipeline.kernels.linearization import PulledBack
from metaloom.pipeline.nn.optimizers import dot
from metaloom.pipeline.policies.gaussian import LOG_STD, GaussianPolicy
from metaloom.pipeline.types import Array, ParallelMap, Params

MAX_KEPT_BYTES = 1 << 30
"""What all chunks together may keep between products. The others compute it again: slower, the same bits."""

DIFFERENCE_STEP = 1e-5
"""ε of finite differences."""

HessianProduct = Callable[[Array], Array]
"""H v for v [D] float64."""


class FlatParams:
    """Some parameters as one vector, in order.

    Attributes:
        names: of these parameters.
    """

    def __init__(self, params: Mapping[str, Array], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._shapes = [params[name].shape for name in self.names]
        self._ends = np.cumsum([math.prod(shape) for shape in self._shapes])

    def pack(self, values: Mapping[str, Array]) -> Array:
        """[D] float64."""
        return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in self.names])

    def unpack(self, vector: Array) -> Params:
        """By name, in the dtype of the vector."""
        parts = zip(self.names, np.split(vector, self._ends[:-1]), self._shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}


def exact_product(
    problem: MetaProblem,
    params: Mapping[str, Array],
    flat: FlatParams,
    chunks: Sequence[Chunk],
    *,
    parallel: ParallelMap = map,
) -> HessianProduct:
    """H v, differentiated without approximation.

    Args:
        problem: how a policy adapts; its step sizes are numbers, not meta-parameters.
        params: θ.
        flat: the order of the vector's elements.
        chunks: rows of all tasks.
        parallel: maps over the chunks.
    """
    num_tasks = sum(len(chunk) for chunk in chunks)

    def curvature(chunk: Chunk) -> ChunkCurvature:
        return ChunkCurvature(problem, params, flat.names, chunk)

    sizes = np.cumsum([ChunkCurvature.num_bytes(problem.policy, chunk) for chunk in chunks])
    num_kept = int(np.searchsorted(sizes, MAX_KEPT_BYTES, side="right"))
    kept = list(parallel(curvature, chunks[:num_kept]))
    work = [*kept, *chunks[num_kept:]]

    def product(v: Array) -> Array:
        direction = flat.unpack(v)

        def of_chunk(item: ChunkCurvature | Chunk) -> Params:
            known = item if isinstance(item, ChunkCurvature) else curvature(item)
            return known.product(direction)

        parts = list(parallel(of_chunk, work))
        return sum_in_order([flat.pack(part) for part in parts]) / num_tasks

    return product


def difference_product(
    problem: MetaProblem,
    params: Mapping[str, Array],
    flat: FlatParams,
    chunks: Sequence[Chunk],
    constraint: Objective,
    *,
    scaled: bool,
    parallel: ParallelMap = map,
) -> HessianProduct:
    """H v from central differences of the constraint's gradient, (∇c(θ + ε v) - ∇c(θ - ε v)) / 2ε.

    Args:
        problem: how a policy adapts.
        params: θ; differences are taken in the dtype of the chunks.
        flat: the order of the vector's elements.
        chunks: rows of all tasks.
        constraint: c, as its `loss`.
        scaled: whether ε is 1e-5 / ‖v‖, or 1e-5 as in the ProMP code.
        parallel: maps over the chunks.
    """
    problem = dataclasses.replace(problem, objective=constraint)
    dtype = _dtype(chunks[0])

    def gradient(shift: Array) -> Array:
        moved = {name: value.astype(dtype) for name, value in params.items()}
        for name, change in flat.unpack(shift).items():
            moved[name] = moved[name] + change.astype(dtype)
        gradients, _ = meta_gradient(problem, moved, chunks, parallel=parallel)
        return flat.pack(gradients)

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
    counts = np.ceil(np.arange(order.shape[1] + 1) * share)
    return order[:, np.flatnonzero(np.diff(counts))]


class ChunkCurvature:
    """J_iᵀ F_i J_i of a chunk's tasks, with all that does not depend on the vector computed once."""

    def __init__(self, problem: MetaProblem, params: Mapping[str, Array], names: Sequence[str], chunk: Chunk) -> None:
        policy, dtype = problem.policy, _dtype(chunk)
        self._names, self._num_tasks, self._inner_lr = names, len(chunk), problem.inner_lr
        self._hessians: list[InnerHessian] = []
        current = {name: self._for_every_task(value.astype(dtype)) for name, value in params.items()}
        self._fixed = {name: np.zeros_like(value) for name, value in current.items() if name not in names}
        self._dtype = dtype
        for rows in chunk.rounds[:-1]:
            hessian = InnerHessian(policy, current, rows, problem.inner_loss)
            # First-order meta-gradients take J for the identity, and so must the metric that goes with them.
            if not problem.first_order:
                self._hessians.append(hessian)
            current = self._step(current, hessian.gradients)
        adapted = {f"adapted {name}": torch.from_numpy(current[name]) for name in names}
        require_finite(adapted, chunk.first_task, "Lower inner_lr.")
        self._fisher = Fisher(policy, current, chunk.rounds[-1])

    @staticmethod
    def num_bytes(policy: GaussianPolicy, chunk: Chunk) -> int:
        """What it keeps: arrays as wide as the hidden layers, four for every inner step and two at the end."""
        arrays = [*(4 for _ in chunk.rounds[:-1]), 2]
        rows = (n * rows.weights.numel() for n, rows in zip(arrays, chunk.rounds, strict=True))
        return sum(rows) * sum(policy.config.hidden_sizes) * _dtype(chunk).itemsize

    def product(self, direction: Mapping[str, Array]) -> Params:
        """Σ_i J_iᵀ F_i J_i v over the chunk's tasks, for v by name without a task axis."""
        tangents = {name: self._for_every_task(value.astype(self._dtype)) for name, value in direction.items()}
        tangents |= self._fixed
        for hessian in self._hessians:
            tangents = self._step(tangents, hessian.product(tangents))
        tangents = self._fisher.product(tangents) | self._fixed
        for hessian in reversed(self._hessians):
            tangents = self._step(tangents, hessian.product(tangents))
        return {name: tangents[name].sum(0) for name in self._names}

    def _for_every_task(self, value: Array) -> Array:
        # Copied, since products with broadcast views are slow.
        return np.repeat(value[None], self._num_tasks, axis=0)

    def _step(self, values: Params, gradients: Params) -> Params:
        return values | {name: values[name] - self._inner_lr * gradients[name] for name in self._names}


class InnerHessian:
    """The Hessian of the inner loss of b tasks at their parameters.

    Attributes:
        gradients: of the inner loss, [b, ...] by name.
    """

    def __init__(self, policy: GaussianPolicy, params: Params, rows: TaskRows, loss: InnerLoss) -> None:
        self._network = policy.linearize(params, rows.observations.numpy())
        self._head = [torch.from_numpy(x).requires_grad_() for x in (self._network.outputs, params[LOG_STD])]
        losses = loss(policy.head(*self._head), rows)
        self._head_gradients = torch.autograd.grad(losses.sum(), self._head, create_graph=True)
        mean, log_std = (gradient.detach().numpy() for gradient in self._head_gradients)
        self._pulled = PulledBack(self._network, mean)
        self.gradients = self._pulled.gradients | {LOG_STD: log_std}

    def product(self, tangents: Params) -> Params:
        """The Hessian times the tangents of every task."""
        pushed = self._network.push(tangents)
        # The head is only as wide as the action, so automatic differentiation may do it, for any loss.
        directions = [torch.from_numpy(x) for x in (pushed[-1], tangents[LOG_STD])]
        mean, log_std = torch.autograd.grad(self._head_gradients, self._head, directions, retain_graph=True)
        return self._pulled.differentiate(tangents, pushed, mean.numpy()) | {LOG_STD: log_std.numpy()}


class Fisher:
    """The Fisher matrix of b tasks' policies, mean over each task's rows."""

    def __init__(self, policy: GaussianPolicy, params: Params, rows: TaskRows) -> None:
        self._network = policy.linearize(params, rows.observations.numpy())
        log_std = torch.from_numpy(params[LOG_STD]).requires_grad_()
        clamped = policy.head(torch.from_numpy(self._network.outputs), log_std).log_std
        (clamp_slope,) = torch.autograd.grad(clamped.sum(), log_std)
        # Of a Gaussian: 1 / σ² for the mean, 2 for log σ.
        self._mean_weight = (rows.weights.unsqueeze(-1) * (-2 * clamped.detach()).exp()).numpy()
        self._log_std_weight = (2 * rows.weights.sum(-1, keepdim=True) * clamp_slope.square()).numpy()

    def product(self, tangents: Params) -> Params:
        """The Fisher matrix times the tangents of every task."""
        mean = self._network.push(tangents)[-1]
        mean *= self._mean_weight
        return self._network.pull(mean) | {LOG_STD: tangents[LOG_STD] * self._log_std_weight}


def _dtype(chunk: Chunk) -> np.dtype:
    return chunk.rounds[0].weights.numpy().dtype
