"""Optimizers on mappings of float32 arrays. State goes in and comes out; nothing is kept."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.types import Array, Params

FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
STEP_COUNT = "step_count"


@dataclass(frozen=True)
class Adam:
    """Adam with ε outside the bias correction: p -= α √(1 - β₂ᵗ) / (1 - β₁ᵗ) * m / (√v + ε).

    Kingma and Ba 2015, arXiv:1412.6980, the efficient form at the end of section 2 ("epsilon hat"), which is that of
    TensorFlow 1. Elementwise in the dtype of the parameters, so the bits depend on neither threads nor layout.
    """

    learning_rate: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def initialize(self, params: Mapping[str, Array]) -> Params:
        """State before the first step: zero moments by parameter name, and the number of steps made."""
        state: Params = {STEP_COUNT: np.zeros((), np.int64)}
        for moment in (FIRST_MOMENT, SECOND_MOMENT):
            state |= {f"{moment}.{name}": np.zeros_like(value) for name, value in params.items()}
        return state

    def step(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: Mapping[str, Array]
    ) -> tuple[Params, Params]:
        """Parameters and state after one step.

        Args:
            params: those that have a gradient are changed, the others passed on.
            gradients: by parameter name.
            state: from initialize or the last step.
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
