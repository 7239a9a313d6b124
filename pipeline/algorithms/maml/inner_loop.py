"""The inner update, shared by `adapt` and by the meta-gradient that differentiates through it.

θ_i^{k+1} = θ_i^k - α_k ⊙ ∇ L_in(θ_i^k; samples of task i in round k), for a chunk of tasks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.finite_checks import require_finite
from metaloom.pipeline.algorithms.maml.rows import TaskRows, chunk_bounds, task_rows, to_tensor
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.types import Array, ParallelMap, Step, TaskParams

TensorParams = dict[str, Tensor]

InnerLoss = Callable[[DiagGaussian, TaskRows], Tensor]
"""Loss of every task [b], from the current policy's distribution on the rows."""

StepSize = Mapping[str, Tensor] | float
"""α of one inner step: a number, or a tensor per learned parameter that broadcasts to [b, ...]."""


def inner_step(
    policy: GaussianPolicy,
    params: TensorParams,
    losses: Tensor,
    step_size: StepSize,
    *,
    differentiable: bool,
) -> TensorParams:
    """Parameters of every task after one gradient step.

    Args:
        policy: says which parameters learn; the others are passed on.
        params: [b, ...] by name, part of the graph of `losses`.
        losses: [b]; a task's loss depends on its own parameters only.
        step_size: α.
        differentiable: whether to differentiate through the gradient as well.
    """
    names = policy.learned(params)
    # The graph is retained in any case: a KL penalty differentiates the same forward pass once more.
    gradients = torch.autograd.grad(
        losses.sum(), [params[name] for name in names], create_graph=differentiable, retain_graph=True
    )
    adapted = dict(params)
    for name, gradient in zip(names, gradients, strict=True):
        alpha = step_size[name] if isinstance(step_size, Mapping) else step_size
        adapted[name] = params[name] - alpha * gradient
    return adapted


def distributions_along_adaptation(
    policy: GaussianPolicy,
    params: TensorParams,
    rounds: Sequence[TaskRows],
    step_sizes: Sequence[StepSize],
    inner_loss: InnerLoss,
    *,
    differentiable: bool,
) -> list[DiagGaussian]:
    """The distribution on round k of the policy after k inner steps, for k = 0 ... K.

    Args:
        policy: the policy.
        params: θ for every task, [b, ...], requiring gradients.
        rounds: K + 1 rounds of rows.
        step_sizes: K of them.
        inner_loss: L_in.
        differentiable: see inner_step.
    """
    distributions = [policy.distribution(params, rounds[0].observations)]
    for rows, next_rows, step_size in zip(rounds[:-1], rounds[1:], step_sizes, strict=True):
        losses = inner_loss(distributions[-1], rows)
        params = inner_step(policy, params, losses, step_size, differentiable=differentiable)
        distributions.append(policy.distribution(params, next_rows.observations))
    return distributions


def adapt_tasks(
    policy: GaussianPolicy,
    params: TaskParams,
    step: Step,
    step_size: Mapping[str, Array] | float,
    inner_loss: InnerLoss,
    *,
    tasks_per_chunk: int,
    parallel: ParallelMap = map,
) -> TaskParams:
    """Parameters of every task after one inner step on its own samples, as values.

    Args:
        policy: the policy.
        params: of every task before the step.
        step: samples that were collected with these parameters.
        step_size: α, a number or an array per learned parameter.
        inner_loss: L_in.
        tasks_per_chunk: tasks computed at once.
        parallel: maps over the chunks.

    Raises:
        NumericalError: naming the task and the array that is not finite.
    """

    def work(tasks: slice) -> dict[str, Array]:
        rows = task_rows(step, tasks)
        before = params.slice(tasks.start, tasks.stop).params
        leaves = {name: to_tensor(value, torch.float32).requires_grad_() for name, value in before.items()}
        losses = inner_loss(policy.distribution(leaves, rows.observations), rows)
        adapted = inner_step(policy, leaves, losses, _tensor_step_size(step_size), differentiable=False)
        require_finite({f"adapted {name}": value for name, value in adapted.items()}, tasks.start, "Lower inner_lr.")
        return {name: value.detach().numpy() for name, value in adapted.items()}

    chunks = list(parallel(work, chunk_bounds(len(step.episodes.lengths), tasks_per_chunk)))
    return TaskParams({name: np.concatenate([chunk[name] for chunk in chunks]) for name in params.params})


def _tensor_step_size(step_size: Mapping[str, Array] | float) -> StepSize:
    if isinstance(step_size, Mapping):
        return {name: to_tensor(value, torch.float32) for name, value in step_size.items()}
    return step_size
