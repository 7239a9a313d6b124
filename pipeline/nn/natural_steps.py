"""The conjugate gradient method, and natural-gradient steps within a trust region."""

import math
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from metaloom.pipeline.nn.optimization import NaturalSteps
from metaloom.pipeline.types import Array, Metrics, Params


class LinearSolution(NamedTuple):
    """Approximate solution of A x = b, with the residual b - A x and the number of products with A."""

    x: Array
    residual: Array
    iterations: int


def conjugate_gradient(
    product: Callable[[Array], Array], b: Array, *, iterations: int, tolerance: float
) -> LinearSolution:
    """Solve A x = b for a symmetric positive definite matrix A, starting at x = 0. Hestenes and Stiefel 1952.

    The iteration stops early if the squared norm of the residual falls to the tolerance, or if pᵀA p is not positive
    for a direction p, since A is then not positive definite.
    """
    x, residual, direction = np.zeros_like(b), b, b
    squared_norm = dot(residual, residual)
    done = 0
    while done < iterations and squared_norm > tolerance:
        image = product(direction)
        done += 1
        curvature = dot(direction, image)
        if not curvature > 0:
            break
        length = squared_norm / curvature
        x, residual = x + length * direction, residual - length * image
        last, squared_norm = squared_norm, dot(residual, residual)
        direction = residual + squared_norm / last * direction
    return LinearSolution(x, residual, done)


def dot(a: Array, b: Array) -> float:
    """Return the inner product of two arrays, bitwise identical for any number of BLAS threads."""
    return float(np.sum(a * b))


Value = TypeVar("Value")


class LineSearchTrial(NamedTuple, Generic[Value]):
    """Parameters tried by the line search, and the value that `evaluate` returned for them."""

    params: Params
    value: Value | None


def natural_step(product: Callable[[Array], Array], gradient: Array, settings: NaturalSteps) -> tuple[Array, Metrics]:
    """Return the natural-gradient step [D] whose KL divergence is max_kl in a quadratic model, and metrics.

    The step is zero if the model's curvature is not positive. TRPO, Schulman et al. 2015, arXiv:1502.05477, section 6
    and appendix C.
    """
    damped = lambda v: product(v) + settings.cg_damping * v  # noqa: E731
    x, residual, iterations = conjugate_gradient(
        damped, gradient, iterations=settings.cg_iterations, tolerance=settings.cg_tolerance
    )
    metrics = {"cg_iterations": float(iterations), "cg_residual": math.sqrt(dot(residual, residual))}
    # Compute xᵀ G x from the residual g - G x, which saves a product with G.
    curvature = dot(x, gradient - residual)
    if not curvature > 0:
        return np.zeros_like(gradient), metrics
    return -math.sqrt(2 * settings.max_kl / (curvature + 1e-8)) * x, metrics


def search(
    params: Params,
    full_step: Mapping[str, Array],
    evaluate: Callable[[Params], Value | None],
    accept: Callable[[Value], bool],
    settings: NaturalSteps,
) -> tuple[LineSearchTrial[Value] | None, Metrics]:
    """Search along a step, trying fractions 1, ratio, ratio², ...; return the accepted trial, or None, and metrics."""
    trials, accepted, found = 0, False, LineSearchTrial[Value](params, None)
    can_move = any(step.any() for step in full_step.values())
    while can_move and not accepted and trials < settings.line_search_trials:
        fraction = settings.backtrack_ratio**trials
        moved = {name: (params[name] + fraction * step).astype(params[name].dtype) for name, step in full_step.items()}
        found = LineSearchTrial(params | moved, evaluate(params | moved))
        accepted = found.value is not None and accept(found.value)
        trials += 1
    accepted |= settings.accept_violation and found.value is not None
    return found if accepted else None, {"line_search_trials": float(trials), "step_accepted": float(accepted)}
