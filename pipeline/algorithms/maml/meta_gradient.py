"""The meta-gradient: through the inner steps, chunk of tasks by chunk, summed in a fixed order.

A meta-parameter is a policy parameter or, with trainable inner step sizes, the logarithm of one; both live in one flat
mapping. Chunks are fixed by the number of tasks alone, so the bits do not depend on how many threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.finite_checks import require_finite
from metaloom.pipeline.algorithms.maml.gradient_based import LOG_INNER_LR
from metaloom.pipeline.algorithms.maml.inner_loop import (
    InnerLoss,
    StepSize,
    TensorParams,
    distributions_along_adaptation,
)
from metaloom.pipeline.algorithms.maml.rows import Chunk, to_tensor
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.types import Array, ParallelMap, Params

LOSS = "loss"

Summand = TypeVar("Summand", Tensor, Array)

TaskValues = dict[str, Array]
"""Quantities of every task by name, [B, ...]."""

Objective = Callable[[Sequence[DiagGaussian], Chunk], dict[str, Tensor]]
"""Quantities [b, ...] of a chunk's tasks from the policy after k inner steps on the rows of round k, k = 0 ... K.

`loss` [b] is the one to minimize."""


@dataclass(frozen=True)
class MetaProblem:
    """What is differentiated: how a policy adapts, and its loss after adaptation.

    Attributes:
        policy: the policy.
        inner_loss: L_in.
        inner_lr: step size where the meta-parameters hold none.
        first_order: whether inner gradients count as constants.
        objective: the outer loss of each task; the meta-loss is their mean.
    """

    policy: GaussianPolicy
    inner_loss: InnerLoss
    inner_lr: float
    first_order: bool
    objective: Objective


def meta_gradient(
    problem: MetaProblem,
    meta_params: Mapping[str, Array],
    chunks: Sequence[Chunk],
    *,
    parallel: ParallelMap = map,
) -> tuple[Params, TaskValues]:
    """Gradient of the mean loss with respect to the learned meta-parameters, and the objective's values.

    Raises:
        NumericalError: naming the task and the quantity that is not finite.
    """

    def work(chunk: Chunk) -> tuple[TensorParams, TaskValues]:
        leaves = _leaves(problem, meta_params, chunk)
        values = _objective_values(problem, leaves, chunk, differentiable=not problem.first_order)
        learned = [name for name, leaf in leaves.items() if leaf.requires_grad]
        gradients = torch.autograd.grad(values[LOSS].sum(), [leaves[name] for name in learned])
        per_task = {f"gradient of {name}": value for name, value in zip(learned, gradients, strict=True)}
        require_finite(per_task, chunk.first_task, "Lower outer_lr or inner_lr.")
        return {name: value.sum(0) for name, value in zip(learned, gradients, strict=True)}, _arrays(values)

    results = list(parallel(work, chunks))
    num_tasks = sum(len(chunk) for chunk in chunks)
    gradients = {name: sum_in_order([part[name] for part, _ in results]) / num_tasks for name in results[0][0]}
    return {name: value.numpy() for name, value in gradients.items()}, _join([values for _, values in results])


def meta_objective(
    problem: MetaProblem,
    meta_params: Mapping[str, Array],
    chunks: Sequence[Chunk],
    *,
    parallel: ParallelMap = map,
) -> TaskValues:
    """The objective's values without a meta-gradient."""

    def work(chunk: Chunk) -> TaskValues:
        leaves = _leaves(problem, meta_params, chunk)
        return _arrays(_objective_values(problem, leaves, chunk, differentiable=False))

    return _join(list(parallel(work, chunks)))


def step_sizes(meta_params: Mapping[str, Tensor], inner_lr: float, inner_steps: int) -> list[StepSize]:
    """Step sizes of every inner step: exp of the trainable logarithms [b, K, ...], or the number `inner_lr`."""
    alphas = {
        name.removeprefix(LOG_INNER_LR): value.exp()
        for name, value in meta_params.items()
        if name.startswith(LOG_INNER_LR)
    }
    if not alphas:
        return [inner_lr] * inner_steps
    return [{name: alpha[:, k] for name, alpha in alphas.items()} for k in range(inner_steps)]


def _leaves(problem: MetaProblem, meta_params: Mapping[str, Array], chunk: Chunk) -> TensorParams:
    # Every task gets its own copy, as in `adapt`: gradients then come out per task, which names a task that went wrong.
    dtype = chunk.rounds[0].weights.dtype
    leaves = {
        name: to_tensor(np.broadcast_to(value, (len(chunk), *value.shape)), dtype)
        for name, value in meta_params.items()
    }
    fixed = set(_policy_params(leaves)) - set(problem.policy.learned(_policy_params(leaves)))
    return {name: leaf.requires_grad_(name not in fixed) for name, leaf in leaves.items()}


def _objective_values(
    problem: MetaProblem, leaves: TensorParams, chunk: Chunk, *, differentiable: bool
) -> dict[str, Tensor]:
    current = distributions_along_adaptation(
        problem.policy,
        _policy_params(leaves),
        chunk.rounds,
        step_sizes(leaves, problem.inner_lr, len(chunk.rounds) - 1),
        problem.inner_loss,
        differentiable=differentiable,
    )
    values = problem.objective(current, chunk)
    require_finite(values, chunk.first_task, "Lower outer_lr or inner_lr.")
    return values


def _policy_params(leaves: TensorParams) -> TensorParams:
    return {name: leaf for name, leaf in leaves.items() if not name.startswith(LOG_INNER_LR)}


def sum_in_order(parts: Sequence[Summand]) -> Summand:
    """Sum whose bits depend on the order of the parts alone."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _arrays(values: Mapping[str, Tensor]) -> TaskValues:
    return {name: value.detach().numpy() for name, value in values.items()}


def _join(parts: Sequence[TaskValues]) -> TaskValues:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
