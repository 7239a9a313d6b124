"""A step within a trust region: the natural gradient at the length that a bound of the KL allows, then a line search.

TRPO, Schulman et al. 2015, arXiv:1502.05477, section 6 and appendix C.
"""

import math
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from metaloom.pipeline.nn.optimization import NaturalSteps
from metaloom.pipeline.nn.optimizers import conjugate_gradient, dot
from metaloom.pipeline.types import Array, Metrics, Params

Value = TypeVar("Value")


class Trial(NamedTuple, Generic[Value]):
    """Parameters that the line search tried, and what was found there; None where something was not finite."""

    params: Params
    value: Value | None


def natural_step(product: Callable[[Array], Array], gradient: Array, settings: NaturalSteps) -> tuple[Array, Metrics]:
    """Return the step [D] that has a KL of max_kl by the quadratic model; zero where that has no positive curvature.

    Args:
        product: the metric times a vector [D].
        gradient: of the loss, [D] float64.
        settings: bound of the KL, and of conjugate gradient.
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
    """Try the fractions 1, ratio, ratio², ... of a step until one will do; None where parameters stay as they are.

    Args:
        params: where the search begins.
        full_step: of some of them, by name.
        evaluate: what is to be known of parameters; None where something is not finite.
        accept: whether that will do.
        settings: of the line search.
    """
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
