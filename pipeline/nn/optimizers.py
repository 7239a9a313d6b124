"""NumPy optimizers: functional Adam, and in-place Adam and RMSprop."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.types import Array, Params

FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
STEP_COUNT = "step_count"


@dataclass(frozen=True)
class Adam:
    """Adam with ε outside the bias correction: p -= α √(1 - β₂ᵗ) / (1 - β₁ᵗ) * m / (√v + ε).

    Kingma and Ba 2015, arXiv:1412.6980, the efficient form at the end of section 2 ("epsilon hat"), as in
    TensorFlow 1. All operations are elementwise in the parameters' dtype, so results do not depend on threads or
    layout.
    """

    learning_rate: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def initialize(self, params: Mapping[str, Array]) -> Params:
        """Return the state before the first step: a step count and zero moments for each parameter."""
        state: Params = {STEP_COUNT: np.zeros((), np.int64)}
        for moment in (FIRST_MOMENT, SECOND_MOMENT):
            state |= {f"{moment}.{name}": np.zeros_like(value) for name, value in params.items()}
        return state

    def step(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: Mapping[str, Array]
    ) -> tuple[Params, Params]:
        """Return the parameters and state after one step."""
        count = int(state[STEP_COUNT]) + 1
        correction = np.sqrt(1 - self.beta_2**count) / (1 - self.beta_1**count)
        stepped, new_state = dict(params), dict(state)
        new_state[STEP_COUNT] = np.array(count, np.int64)
        for name, gradient in gradients.items():
            # Python floats as factors make NumPy compute in the arrays' precision.
            first = self.beta_1 * state[f"{FIRST_MOMENT}.{name}"] + (1 - self.beta_1) * gradient
            second = self.beta_2 * state[f"{SECOND_MOMENT}.{name}"] + (1 - self.beta_2) * gradient**2
            scale = float(self.learning_rate * correction)
            stepped[name] = np.asarray(params[name] - scale * first / (np.sqrt(second) + self.epsilon))
            new_state[f"{FIRST_MOMENT}.{name}"] = np.asarray(first)
            new_state[f"{SECOND_MOMENT}.{name}"] = np.asarray(second)
        return stepped, new_state


@dataclass
class AdamInPlace:
    """Adam on a single vector: p -= α m̂ / (√v̂ + ε), with bias-corrected m̂ and v̂.

    Kingma and Ba 2015, arXiv:1412.6980, algorithm 1, with ε = 1e-5, as is common for actor-critic methods.
    """

    first: Array
    second: Array
    count: int = 0
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-5

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> "AdamInPlace":
        """Restore an optimizer from its `state`."""
        return cls(state[FIRST_MOMENT].copy(), state[SECOND_MOMENT].copy(), int(state[STEP_COUNT]))

    @staticmethod
    def initial(params: Array) -> Params:
        """Return the state before the first step."""
        zeros = np.zeros_like(params)
        return {FIRST_MOMENT: zeros, SECOND_MOMENT: zeros.copy(), STEP_COUNT: np.zeros((), np.int64)}

    @property
    def state(self) -> Params:
        """Moments and step count, keyed by name."""
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
    """RMSprop on a single vector: v = β v + (1 - β) g², p -= α g / (√v + ε). Tieleman and Hinton 2012, lecture 6.5."""

    second: Array
    beta: float = 0.99
    epsilon: float = 1e-5

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> "RMSpropInPlace":
        return cls(state[SECOND_MOMENT].copy())

    @staticmethod
    def initial(params: Array) -> Params:
        return {SECOND_MOMENT: np.zeros_like(params)}

    @property
    def state(self) -> Params:
        return {SECOND_MOMENT: self.second}

    def step(self, params: Array, gradient: Array, learning_rate: float) -> None:
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
"""In-place optimizers, keyed by their name in settings."""
