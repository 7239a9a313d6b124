"""Gauss-Newton products with hand-written derivatives, for Gaussian and categorical policies.

The reference definition is gauss_newton_product in maml.trpo. Everything that does not depend on the vector is computed
only once; automatic differentiation recomputes it for every product and takes up to twice as long.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import cast

import numpy as np
import torch

from metaloom.pipeline.algorithms.maml.meta_gradient import InnerLoss, MetaProblem
from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows, require_finite
from metaloom.pipeline.algorithms.maml.trpo import MetaPoint, Product, chunk_dtype
from metaloom.pipeline.nn.linearization import LinearizedMLP, PulledBack
from metaloom.pipeline.policies.build import LOG_STD, CategoricalPolicy, GaussianPolicy
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.types import Array, Params

KnownPolicy = GaussianPolicy | CategoricalPolicy

MAX_KEPT_BYTES = 1 << 30
"""Maximum size in bytes of the arrays kept between products. Other chunks recompute theirs, with identical results."""


def fused_gauss_newton_product(at: MetaPoint) -> Product:
    """Return v ↦ G v for the Gauss-Newton matrix G."""
    curvature = partial(ChunkCurvature, at.problem, at.params, [*at.flat.params])
    sizes = np.cumsum([ChunkCurvature.num_bytes(at.problem.policy, chunk) for chunk in at.chunks])
    num_kept = int(np.searchsorted(sizes, MAX_KEPT_BYTES, side="right"))
    work = [*at.parallel(curvature, at.chunks[:num_kept]), *at.chunks[num_kept:]]

    def product(v: Array) -> Array:
        direction = at.flat.views(v)

        def of_chunk(item: ChunkCurvature | Chunk) -> Params:
            known = item if isinstance(item, ChunkCurvature) else curvature(item)
            return known.product(direction)

        return reduce(add, map(at.flat.pack, at.parallel(of_chunk, work))) / at.num_tasks

    return product


class ChunkCurvature:
    """The matrices J_iᵀ F_i J_i of a chunk's tasks. Parts shared by the products with all vectors are precomputed."""

    def __init__(self, problem: MetaProblem, params: Mapping[str, Array], names: Sequence[str], chunk: Chunk) -> None:
        # Guaranteed when this kernel is chosen.
        policy, dtype = cast(KnownPolicy, problem.policy), chunk_dtype(chunk)
        self._names, self._num_tasks, self._inner_lr = names, len(chunk), problem.inner_lr
        self._hessians: list[InnerHessian] = []
        current = {name: self._for_every_task(value.astype(dtype)) for name, value in params.items()}
        self._fixed = {name: np.zeros_like(value) for name, value in current.items() if name not in names}
        self._dtype = dtype
        for rows in chunk.rounds[:-1]:
            hessian = InnerHessian(policy, current, rows, problem.inner_loss)
            # First-order meta-gradients treat J as the identity, so the metric must, too.
            if not problem.first_order:
                self._hessians.append(hessian)
            current = self._step(current, hessian.gradients)
        adapted = {name: torch.as_tensor(current[name]) for name in names}
        require_finite(adapted, chunk.first_task, "Lower inner_lr.", of="adapted ")
        if isinstance(policy, GaussianPolicy):
            self._fisher = _gaussian_fisher(policy, current, chunk.rounds[-1])
        else:
            self._fisher = _categorical_fisher(policy, current, chunk.rounds[-1])

    @staticmethod
    def num_bytes(policy: Policy, chunk: Chunk) -> int:
        """Return the memory in bytes of a chunk's largest arrays, which are as wide as the hidden layers."""
        # Four arrays per inner step, and two at the end.
        arrays = [*(4 for _ in chunk.rounds[:-1]), 2]
        rows = (n * rows.weights.numel() for n, rows in zip(arrays, chunk.rounds, strict=True))
        return sum(rows) * sum(policy.network.spec.hidden_sizes) * chunk_dtype(chunk).itemsize

    def product(self, direction: Mapping[str, Array]) -> Params:
        """Return Σ_i J_iᵀ F_i J_i v over the chunk's tasks; v and the result are keyed by parameter name."""
        tangents = {name: self._for_every_task(value.astype(self._dtype)) for name, value in direction.items()}
        tangents |= self._fixed
        for hessian in self._hessians:
            tangents = self._step(tangents, hessian.product(tangents))
        tangents = self._fisher(tangents) | self._fixed
        for hessian in reversed(self._hessians):
            tangents = self._step(tangents, hessian.product(tangents))
        return {name: tangents[name].sum(0) for name in self._names}

    def _for_every_task(self, value: Array) -> Array:
        # Copy, since products with broadcast views are slow.
        return np.repeat(value[None], self._num_tasks, axis=0)

    def _step(self, values: Params, gradients: Params) -> Params:
        return values | {name: values[name] - self._inner_lr * gradients[name] for name in self._names}


class InnerHessian:
    """Hessians and gradients of b tasks' inner losses at the tasks' parameters."""

    def __init__(self, policy: KnownPolicy, params: Params, rows: TaskRows, loss: InnerLoss) -> None:
        self._network = _linearized(policy, params, rows)
        # Distribution parameters other than the network's outputs.
        self._others = [LOG_STD] if isinstance(policy, GaussianPolicy) else []
        inputs = (self._network.outputs, *(params[name] for name in self._others))
        self._head = [torch.as_tensor(x).requires_grad_() for x in inputs]
        losses = loss(policy.head(*self._head), rows)
        self._head_gradients = torch.autograd.grad(losses.sum(), self._head, create_graph=True)
        outputs, *others = (gradient.detach().numpy() for gradient in self._head_gradients)
        self._pulled = PulledBack(self._network, outputs)
        self.gradients: dict[str, Array] = self._pulled.gradients | dict(zip(self._others, others, strict=True))

    def product(self, tangents: Params) -> Params:
        """Return each task's Hessian times its tangents."""
        pushed = self._network.push(tangents)
        # The head is only as wide as the action, so automatic differentiation is cheap and works for any loss.
        directions = [torch.as_tensor(x) for x in (pushed[-1], *(tangents[name] for name in self._others))]
        outputs, *others = torch.autograd.grad(self._head_gradients, self._head, directions, retain_graph=True)
        rest = {name: value.numpy() for name, value in zip(self._others, others, strict=True)}
        return self._pulled.differentiate(tangents, pushed, outputs.numpy()) | rest


def _gaussian_fisher(policy: GaussianPolicy, params: Params, rows: TaskRows) -> Callable[[Params], Params]:
    """Return the product with each task's Fisher matrix, averaged over its rows, as a function of the tangents."""
    network = _linearized(policy, params, rows)
    log_std = torch.as_tensor(params[LOG_STD]).requires_grad_()
    clamped = policy.head(torch.as_tensor(network.outputs), log_std).log_std
    (clamp_slope,) = torch.autograd.grad(clamped.sum(), log_std)
    # Fisher information of a Gaussian: 1 / σ² for the mean, 2 for log σ.
    mean_weight = (rows.weights.unsqueeze(-1) * (-2 * clamped.detach()).exp()).numpy()
    log_std_weight = (2 * rows.weights.sum(-1, keepdim=True) * clamp_slope.square()).numpy()

    def product(tangents: Params) -> Params:
        mean = network.push(tangents)[-1]
        mean *= mean_weight
        return network.pull(mean) | {LOG_STD: tangents[LOG_STD] * log_std_weight}

    return product


def _categorical_fisher(policy: CategoricalPolicy, params: Params, rows: TaskRows) -> Callable[[Params], Params]:
    """Return the product with each task's Fisher matrix, averaged over its rows, as a function of the tangents."""
    network = _linearized(policy, params, rows)
    probs = policy.head(torch.as_tensor(network.outputs)).log_probs.exp().numpy()
    weights = rows.weights.unsqueeze(-1).numpy()

    def product(tangents: Params) -> Params:
        logits = network.push(tangents)[-1]
        # With respect to the logits, the Fisher matrix is diag(p) - p pᵀ.
        logits -= (probs * logits).sum(-1, keepdims=True)
        logits *= probs * weights
        return network.pull(logits)

    return product


def _linearized(policy: KnownPolicy, params: Params, rows: TaskRows) -> LinearizedMLP:
    network = policy.network
    return LinearizedMLP(
        network.prefix, len(network.spec.hidden_sizes), params, rows.observations.numpy(), network.spec.activation
    )
