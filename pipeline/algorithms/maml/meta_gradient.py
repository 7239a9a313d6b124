"""Per-task losses, the inner update, and the meta-gradient through it.

θ_i^{k+1} = θ_i^k - α_k ⊙ ∇ L_in(θ_i^k; samples of task i at step k); the meta-loss is the mean over tasks i of the
objective at θ_i^0 ... θ_i^K as functions of θ. Results are computed chunk by chunk and summed in chunk order. Chunks
depend only on the number of tasks, so results are bitwise identical for any number of threads.

A meta-parameter is a policy parameter or, with trainable inner step sizes, the logarithm of a step size; both
are entries of a single flat mapping.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows, require_finite, to_tensor
from metaloom.pipeline.nn.distributions import Distribution, clipped_surrogate, likelihood_ratio
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.types import Array, Metrics, ParallelMap, Params

LOSS = "loss"  # name of the minimized quantity

INNER_KL = "inner_kl_"
"""Name prefix of the KLs before adaptation, from the behavior policy of rollout batch k to the current policy."""

OUTER_KL = "outer_kl"  # name of the KL after adaptation, from the behavior policy to the current policy

STANDARD_ERROR, SPLIT_COSINE = "meta_gradient_standard_error", "meta_gradient_split_cosine"

LOG_INNER_LR = "log_inner_lr."
"""Name prefix of trainable inner step sizes: log α for each inner step and parameter element, [K, ...]."""

TensorParams = dict[str, Tensor]

TaskValues = dict[str, Array]  # per-task quantities keyed by name, [B, ...] each

InnerLoss = Callable[[Distribution, TaskRows], Tensor]
"""Function that computes per-task losses [b] from the current policy's distribution on the rows."""

Objective = Callable[[Sequence[Distribution], Chunk], dict[str, Tensor]]
"""Function from the action distributions after k = 0 ... K inner steps, each on rollout batch k, to per-task
quantities [b, ...] of a chunk. `loss` [b] is minimized."""

StepSize = Mapping[str, Tensor] | float
"""Step size α of an inner step: a number, or a tensor per learned parameter that broadcasts to [b, ...]."""


def likelihood_ratio_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -mean(r A) with r = π_θ(a|o) / π_behavior(a|o), for each task, [b].

    Its second derivative keeps the term A ∇log π ∇log πᵀ (low-variance curvature, Rothfuss et al. 2019).
    """
    return -rows.mean(likelihood_ratio(current.log_prob(rows.actions), rows.behavior_log_prob) * rows.advantages)


def log_likelihood_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -mean(A log π_θ(a|o)) for each task, [b]. Williams 1992.

    If π_θ is the behavior policy, likelihood_ratio_loss has the same gradient, but one more term in its second
    derivative: A ∇log π ∇log πᵀ.
    """
    return -rows.mean(current.log_prob(rows.actions) * rows.advantages)


INNER_LOSSES = {"log_likelihood": log_likelihood_loss, "likelihood_ratio": likelihood_ratio_loss}
"""Inner losses, keyed by the value of the `inner_loss` setting."""


def clipped_loss(current: Distribution, rows: TaskRows, clip_eps: float) -> tuple[Tensor, Tensor]:
    """Return -mean(min(r A, clip(r, 1 ± ε) A)) per task, and the fraction of steps with r outside 1 ± ε, [b] each.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    ratio = likelihood_ratio(current.log_prob(rows.actions), rows.behavior_log_prob)
    outside = ((ratio.detach() - 1).abs() > clip_eps).to(ratio.dtype)
    return -rows.mean(clipped_surrogate(ratio, rows.advantages, clip_eps)), rows.mean(outside)


def policy_kls(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
    """Return KLs from the behavior to the current policies, without gradient: `inner_kl_k` and `outer_kl`, [b] each."""
    kls = [rows.mean(rows.behavior.kl(now.detach())) for now, rows in zip(current, chunk.rounds, strict=True)]
    return {**{f"{INNER_KL}{k}": kl for k, kl in enumerate(kls[:-1])}, OUTER_KL: kls[-1]}


@dataclass(frozen=True)
class MetaProblem:
    """Adaptation of a policy, and the objective that is differentiated through it."""

    policy: Policy
    inner_loss: InnerLoss
    inner_lr: float  # step size of inner steps, unless step sizes are meta-parameters
    first_order: bool  # True to treat inner gradients as constants
    objective: Objective  # the meta-loss is the mean of its `loss` over tasks


def inner_step(
    policy: Policy, params: TensorParams, losses: Tensor, step_size: StepSize, *, differentiable: bool
) -> TensorParams:
    """Return each task's parameters after one gradient step on its loss; only learned parameters change.

    The losses [b] must depend on `params` [b, ...], each only on its own task's parameters. Set `differentiable` to
    differentiate through the step.
    """
    names = policy.learned(params)
    # Always retain the graph: a KL penalty differentiates the same forward pass again.
    gradients = torch.autograd.grad(
        losses.sum(), [params[name] for name in names], create_graph=differentiable, retain_graph=True
    )
    adapted = dict(params)
    for name, gradient in zip(names, gradients, strict=True):
        alpha = step_size[name] if isinstance(step_size, Mapping) else step_size
        adapted[name] = params[name] - alpha * gradient
    return adapted


def meta_gradient(
    problem: MetaProblem,
    meta_params: Mapping[str, Array],
    chunks: Sequence[Chunk],
    *,
    noise: bool = False,
    parallel: ParallelMap = map,
) -> tuple[Params, TaskValues, Metrics]:
    """Return the gradient of the mean loss with respect to the meta-parameters, the objective's values, and metrics.

    The metrics are `meta_gradient_norm` and, with `noise`, those from `noise_metrics`. Raise NumericalError if a value
    is not finite.
    """

    def work(chunk: Chunk) -> tuple[TensorParams, TaskValues, TensorParams, Array]:
        leaves = meta_leaves(problem, meta_params, chunk)
        values = objective_values(problem, leaves, chunk, differentiable=not problem.first_order)
        found = torch.autograd.grad(values[LOSS].sum(), [*leaves.learned.values()])
        gradients = dict(zip(leaves.learned, found, strict=True))
        require_finite(gradients, chunk.first_task, "Lower outer_lr or inner_lr.", of="gradient of ")
        total = {name: value.sum(0) for name, value in gradients.items()}
        if not noise:
            return total, _arrays(values), {}, np.zeros(0)
        # Even indices count from the start of the batch, not of the chunk.
        even = {name: value[chunk.first_task % 2 :: 2].sum(0) for name, value in gradients.items()}
        # On the CPU, because not every device has float64.
        squares = reduce(add, [value.cpu().double().flatten(1).square().sum(1) for value in found])
        return total, _arrays(values), even, squares.numpy()

    totals, values, evens, squares = zip(*parallel(work, chunks), strict=True)
    joined = join(values)
    mean = _arrays({name: reduce(add, [part[name] for part in totals]) / len(joined[LOSS]) for name in totals[0]})
    squared_norm = sum(float(np.sum(np.square(value, dtype=np.float64))) for value in mean.values())
    metrics = {"meta_gradient_norm": math.sqrt(squared_norm)}
    if noise:
        even = _arrays({name: reduce(add, [part[name] for part in evens]) for name in mean})
        metrics |= noise_metrics(mean, even, np.concatenate(squares))
    return mean, joined, metrics


def noise_metrics(mean: Mapping[str, Array], even: Mapping[str, Array], squared_norms: Array) -> Metrics:
    """Return metrics that measure how much the meta-gradient varies across tasks.

    The meta-gradient ḡ = (1/B) Σ g_i is a mean over the B tasks sampled in an iteration. The spread of the per-task
    gradients g_i estimates how much ḡ would change with other tasks and episodes. `even` is the sum of g_i over
    i = 0, 2, 4, ..., and the squared norms are ‖g_i‖², [B].

    Returns:
        `meta_gradient_standard_error`: √(s²/B) with s² = (Σ ‖g_i‖² - B ‖ḡ‖²) / (B - 1), the Euclidean norm of the
        elements' standard errors. If the tasks' gradients are noise around zero, ‖ḡ‖ is about this large.
        `meta_gradient_split_cosine`: cosine between the sums over even and over odd tasks; 0 if one sum is zero.
    """
    B = len(squared_norms)
    of_all, of_even = (
        np.concatenate([value.ravel().astype(np.float64) for value in values.values()]) for values in (mean, even)
    )
    total = of_all * B
    odd = total - of_even
    variance = (float(squared_norms.sum()) - float(total @ total) / B) / (B - 1)
    lengths = math.sqrt(float(of_even @ of_even) * float(odd @ odd))
    return {
        # For equal gradients, rounding may make this negative.
        STANDARD_ERROR: math.sqrt(max(variance, 0.0) / B),
        SPLIT_COSINE: float(of_even @ odd) / lengths if lengths else 0.0,
    }


def meta_objective(
    problem: MetaProblem, meta_params: Mapping[str, Array], chunks: Sequence[Chunk], *, parallel: ParallelMap = map
) -> TaskValues:
    """Return the objective's per-task values for these meta-parameters, without computing a gradient."""

    def work(chunk: Chunk) -> TaskValues:
        leaves = meta_leaves(problem, meta_params, chunk)
        return _arrays(objective_values(problem, leaves, chunk, differentiable=False))

    return join([*parallel(work, chunks)])


@dataclass(frozen=True)
class Leaves:
    """Meta-parameters as leaves of the autograd graph, with a separate copy per task so that gradients are per task."""

    params: TensorParams
    log_inner_lr: TensorParams  # log α [b, K, ...], keyed by parameter name
    learned: TensorParams  # leaves of either kind that require a gradient, keyed by meta-parameter name


def meta_leaves(problem: MetaProblem, meta_params: Mapping[str, Array], chunk: Chunk) -> Leaves:
    """Return a copy of the meta-parameters for each task of a chunk; only learned ones require a gradient."""
    like = chunk.rounds[0].weights
    policy_params = {name: value for name, value in meta_params.items() if not name.startswith(LOG_INNER_LR)}
    learned = problem.policy.learned(policy_params)
    leaves = Leaves({}, {}, {})
    for name, value in meta_params.items():
        leaf = to_tensor(np.broadcast_to(value, (len(like), *value.shape)), like.dtype, like.device)
        if name.startswith(LOG_INNER_LR):
            leaves.log_inner_lr[name.removeprefix(LOG_INNER_LR)] = leaf
        else:
            leaves.params[name] = leaf
        if name in learned or name.startswith(LOG_INNER_LR):
            leaves.learned[name] = leaf.requires_grad_()
    return leaves


def objective_values(problem: MetaProblem, leaves: Leaves, chunk: Chunk, *, differentiable: bool) -> dict[str, Tensor]:
    """Adapt a chunk's tasks and return the objective's values, differentiable with respect to the leaves."""
    params, distribution = leaves.params, problem.policy.distribution
    alphas = {name: log.exp() for name, log in leaves.log_inner_lr.items()}
    current = [distribution(params, chunk.rounds[0].observations)]
    for k, (rows, next_rows) in enumerate(pairwise(chunk.rounds)):
        losses = problem.inner_loss(current[-1], rows)
        alpha = {name: of_steps[:, k] for name, of_steps in alphas.items()} or problem.inner_lr
        params = inner_step(problem.policy, params, losses, alpha, differentiable=differentiable)
        current.append(distribution(params, next_rows.observations))
    values = problem.objective(current, chunk)
    require_finite(values, chunk.first_task, "Lower outer_lr or inner_lr.")
    return values


def join(parts: Sequence[TaskValues]) -> TaskValues:
    """Concatenate the chunks' task values into arrays [B, ...], keyed by name."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _arrays(values: Mapping[str, Tensor]) -> TaskValues:
    return {name: value.detach().cpu().numpy() for name, value in values.items()}
