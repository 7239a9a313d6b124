"""Conjugate gradient, and steps along the natural gradient within a trust region."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from metaloom.pipeline.nn.optimization import NaturalSteps
from metaloom.pipeline.types import Array, Metrics, Params


@dataclass(frozen=True)
class LinearSolution:
    """An approximate solution of A x = b.

    Attributes:
        x: The solution.
        residual: b - A x, as the iteration tracked it.
        iterations: Products with A that it took.
    """

    x: Array
    residual: Array
    iterations: int


def conjugate_gradient(
    product: Callable[[Array], Array], b: Array, *, iterations: int, tolerance: float
) -> LinearSolution:
    """Solve A x = b for a symmetric positive matrix A, from x = 0. Hestenes and Stiefel 1952.

    Stops early, with the solution so far, when the squared residual falls below the tolerance, and when a direction p
    has pᵀA p <= 0 or no number: A is then not positive and further steps would lead away.
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
    """Return the inner product whose bits do not depend on the threads of a linear algebra library."""
    return float(np.sum(a * b))


Value = TypeVar("Value")


class Trial(NamedTuple, Generic[Value]):
    """Parameters that the line search tried, and their evaluation; None where something was not finite."""

    params: Params
    value: Value | None


def natural_step(product: Callable[[Array], Array], gradient: Array, settings: NaturalSteps) -> tuple[Array, Metrics]:
    """Return the step [D] that has a KL of max_kl by the quadratic model; zero where that has no positive curvature.

    TRPO, Schulman et al. 2015, arXiv:1502.05477, section 6 and appendix C.
    """
    solution = conjugate_gradient(
        lambda v: product(v) + settings.cg_damping * v,
        gradient,
        iterations=settings.cg_iterations,
        tolerance=settings.cg_tolerance,
    )
    metrics = {
        "cg_iterations": float(solution.iterations),
        "cg_residual": math.sqrt(dot(solution.residual, solution.residual)),
    }
    # xᵀ G x from the residual g - G x, which spares one more product.
    curvature = dot(solution.x, gradient - solution.residual)
    if not curvature > 0:
        return np.zeros_like(gradient), metrics
    return -math.sqrt(2 * settings.max_kl / (curvature + 1e-8)) * solution.x, metrics


def search(
    params: Params,
    full_step: Mapping[str, Array],
    evaluate: Callable[[Params], Value | None],
    accept: Callable[[Value], bool],
    settings: NaturalSteps,
) -> tuple[Trial[Value] | None, Metrics]:
    """Try the fractions 1, ratio, ratio², ... of a step until one will do; None where parameters stay as they are."""
    trials, accepted, found = 0, False, Trial[Value](params, None)
    can_move = any(step.any() for step in full_step.values())
    while can_move and not accepted and trials < settings.line_search_trials:
        fraction = settings.backtrack_ratio**trials
        moved = {name: (params[name] + fraction * step).astype(params[name].dtype) for name, step in full_step.items()}
        found = Trial(params | moved, evaluate(params | moved))
        accepted = found.value is not None and accept(found.value)
        trials += 1
    accepted |= settings.accept_violation and found.value is not None
    return found if accepted else None, {"line_search_trials": float(trials), "step_accepted": float(accepted)}
