"""Optimizers as functions and in-place updates; conjugate gradient, and steps within a trust region."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from metaloom.pipeline.nn.optimization import NaturalSteps
from metaloom.pipeline.types import Array, Metrics, Params

FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
STEP_COUNT = "step_count"


@dataclass(frozen=True)
class Adam:
    """Adam with ε outside the bias correction: p -= α √(1 - β₂ᵗ) / (1 - β₁ᵗ) * m / (√v + ε).

    Kingma and Ba 2015, arXiv:1412.6980, the efficient form at the end of section 2 ("epsilon hat"), as in
    TensorFlow 1. Elementwise in the dtype of the parameters, so the bits depend on neither threads nor layout.
    """

    learning_rate: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def initialize(self, params: Mapping[str, Array]) -> Params:
        """Return the state before the first step: zero moments by parameter name, and the number of steps made."""
        state: Params = {STEP_COUNT: np.zeros((), np.int64)}
        for moment in (FIRST_MOMENT, SECOND_MOMENT):
            state |= {f"{moment}.{name}": np.zeros_like(value) for name, value in params.items()}
        return state

    def step(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: Mapping[str, Array]
    ) -> tuple[Params, Params]:
        """Return the parameters and state after one step.

        Args:
            params: Parameters; the ones that have a gradient are changed, the others passed on.
            gradients: Gradients by parameter name.
            state: Result of `initialize` or of the last step.
        """
        count = int(state[STEP_COUNT]) + 1
        correction = np.sqrt(1 - self.beta_2**count) / (1 - self.beta_1**count)
        stepped, new_state = dict(params), dict(state)
        new_state[STEP_COUNT] = np.array(count, np.int64)
        for name, gradient in gradients.items():
            # Factors are Python floats: NumPy then computes in the arrays' own precision.
            first = self.beta_1 * state[f"{FIRST_MOMENT}.{name}"] + (1 - self.beta_1) * gradient
            second = self.beta_2 * state[f"{SECOND_MOMENT}.{name}"] + (1 - self.beta_2) * gradient**2
            scale = float(self.learning_rate * correction)
            stepped[name] = np.asarray(params[name] - scale * first / (np.sqrt(second) + self.epsilon))
            new_state[f"{FIRST_MOMENT}.{name}"] = np.asarray(first)
            new_state[f"{SECOND_MOMENT}.{name}"] = np.asarray(second)
        return stepped, new_state


@dataclass
class AdamInPlace:
    """Adam on one vector: p -= α m̂ / (√v̂ + ε), with m̂ and v̂ corrected for their start at zero.

    Kingma and Ba 2015, arXiv:1412.6980, algorithm 1, with the ε of 1e-5 that is customary for actor-critics.
    """

    first: Array
    second: Array
    count: int = 0
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-5

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> "AdamInPlace":
        """Restore the optimizer from a result of `state`."""
        return cls(state[FIRST_MOMENT].copy(), state[SECOND_MOMENT].copy(), int(state[STEP_COUNT]))

    @staticmethod
    def initial(params: Array) -> Params:
        """Return the state before the first step."""
        zeros = np.zeros_like(params)
        return {FIRST_MOMENT: zeros, SECOND_MOMENT: zeros.copy(), STEP_COUNT: np.zeros((), np.int64)}

    @property
    def state(self) -> Params:
        """Moments and step count by name."""
        return {FIRST_MOMENT: self.first, SECOND_MOMENT: self.second, STEP_COUNT: np.array(self.count, np.int64)}

    def step(self, params: Array, gradient: Array, learning_rate: float) -> None:
        """Update the parameters in place."""
        self.count += 1
        self.first *= self.beta_1
        self.first += (1 - self.beta_1) * gradient
        self.second *= self.beta_2
        squares = np.square(gradient)
        squares *= 1 - self.beta_2
        self.second += squares
        denominator = np.sqrt(self.second, out=squares)
        denominator *= float(1 / np.sqrt(1 - self.beta_2**self.count))
        denominator += self.epsilon
        np.divide(self.first, denominator, out=denominator)
        denominator *= learning_rate / (1 - self.beta_1**self.count)
        params -= denominator


@dataclass
class RMSpropInPlace:
    """RMSprop on one vector: v = β v + (1 - β) g², p -= α g / (√v + ε). Tieleman and Hinton 2012, lecture 6.5."""

    second: Array
    beta: float = 0.99
    epsilon: float = 1e-5

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> "RMSpropInPlace":
        """Restore the optimizer from a result of `state`."""
        return cls(state[SECOND_MOMENT].copy())

    @staticmethod
    def initial(params: Array) -> Params:
        """Return the state before the first step."""
        return {SECOND_MOMENT: np.zeros_like(params)}

    @property
    def state(self) -> Params:
        """The moment by name."""
        return {SECOND_MOMENT: self.second}

    def step(self, params: Array, gradient: Array, learning_rate: float) -> None:
        """Update the parameters in place."""
        self.second *= self.beta
        squares = np.square(gradient)
        squares *= 1 - self.beta
        self.second += squares
        denominator = np.sqrt(self.second, out=squares)
        denominator += self.epsilon
        np.divide(gradient, denominator, out=denominator)
        denominator *= learning_rate
        params -= denominator


IN_PLACE: Mapping[str, type[AdamInPlace | RMSpropInPlace]] = {"adam": AdamInPlace, "rmsprop": RMSpropInPlace}
"""By the name that settings give them."""


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

    Args:
        product: A times a vector.
        b: [D] float64.
        iterations: Products with A at most.
        tolerance: Tolerance of the squared norm of the residual.
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

    Args:
        product: The metric times a vector [D].
        gradient: Gradient of the loss, [D] float64.
        settings: Bound of the KL, and of conjugate gradient.
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
        params: Parameters where the search begins.
        full_step: Full step of some parameters, by name.
        evaluate: Evaluates parameters; None where something is not finite.
        accept: Returns True to accept a value.
        settings: Settings of the line search.
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
