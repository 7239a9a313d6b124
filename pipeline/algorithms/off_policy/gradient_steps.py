"""Interface of kernels and their definitions in torch: gradient steps on working copies of a state, counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, TypeVar

import numpy as np

from metaloom.pipeline.algorithms.contract import NUM_UPDATES
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, Params, Transitions

NUM_GRADIENT_STEPS = "num_gradient_steps"
"""Name in the state of the number of gradient steps over the run."""

Noise = TypeVar("Noise", contravariant=True)
"""Random arrays of a gradient step; a kernel and its definition receive the same ones."""


class GradientSteps(Protocol[Noise]):
    """Working copies of all arrays of a state, which gradient steps change in place."""

    def step(self, minibatch: Minibatch, noise: Noise) -> Mapping[str, SupportsFloat]:
        """Make one gradient step; returns what describes it."""
        ...

    def state(self) -> LearnerState:
        """Return the state after the iteration: everything as it is now, and one update more."""
        ...


@dataclass
class Counters:
    """Iterations and gradient steps that a state has learned from."""

    updates: int
    gradient_steps: int

    @classmethod
    def of(cls, state: LearnerState) -> Counters:
        """Return the counters of a state."""
        return cls(int(state.extra[NUM_UPDATES]), int(state.extra[NUM_GRADIENT_STEPS]))

    def arrays(self) -> Params:
        """Return them as a state holds them."""
        counts = {NUM_UPDATES: self.updates, NUM_GRADIENT_STEPS: self.gradient_steps}
        return {name: np.array(count, np.int64) for name, count in counts.items()}


def merged(minibatch: Minibatch) -> Transitions:
    """Return the transitions [K, N] of all tasks as one batch [K * N]."""
    transitions = minibatch.transitions
    columns = (getattr(transitions, name) for name in transitions.__dataclass_fields__)
    return Transitions(*(values.reshape(-1, *values.shape[2:]) for values in columns))


def means(names: Sequence[str], each: Iterable[Mapping[str, SupportsFloat]]) -> Metrics:
    """Return the means over gradient steps, NaN where there was none, and how many there were."""
    # Numbers are read at the end: a device need not be waited for between steps.
    table = [[float(one[name]) for name in names] for one in list(each)]
    averages = np.mean(table, axis=0) if table else np.full(len(names), np.nan)
    return dict(zip(names, averages.tolist(), strict=True)) | {"gradient_steps": float(len(table))}
