"""Counting gradient steps, averaging what they were like, and refusing what diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from metaloom.pipeline.algorithms.contract import NUM_UPDATES
from metaloom.pipeline.algorithms.finite_checks import NumericalError
from metaloom.pipeline.kernels.flat_networks import FlatParams
from metaloom.pipeline.types import Array, LearnerState, Metrics, Params, Transitions

NUM_GRADIENT_STEPS = "num_gradient_steps"
"""Name in the learner of the number of gradient steps over the run."""


def counters(num_updates: int, num_gradient_steps: int) -> Params:
    """As arrays of a learner."""
    return {
        NUM_UPDATES: np.array(num_updates, np.int64),
        NUM_GRADIENT_STEPS: np.array(num_gradient_steps, np.int64),
    }


def num_updates(learner: LearnerState) -> int:
    """Iterations that the learner has learned from."""
    return int(learner.extra[NUM_UPDATES])


def num_gradient_steps(learner: LearnerState) -> int:
    """Gradient steps that the learner has made."""
    return int(learner.extra[NUM_GRADIENT_STEPS])


def merged(transitions: Transitions) -> Transitions:
    """The transitions [K, N] of all tasks as one batch [K * N]."""
    return Transitions(*(_merged(getattr(transitions, name)) for name in transitions.__dataclass_fields__))


def means(names: Sequence[str], each: Iterable[Metrics]) -> Metrics:
    """Means over gradient steps, NaN where there was none, and how many there were."""
    table = [[one[name] for name in names] for one in each]
    averages = np.mean(table, axis=0) if table else np.full(len(names), np.nan)
    return dict(zip(names, averages.tolist(), strict=True)) | {"gradient_steps": float(len(table))}


def require_finite_params(params: Mapping[str, FlatParams]) -> None:
    """Raise NumericalError naming the first parameters that are not finite."""
    for name, flat in params.items():
        if not np.isfinite(flat.vector).all():
            raise NumericalError(
                f"update: parameters of the {name} are not finite after the gradient steps; required finite numbers. "
                "Lower algorithm.learning_rate or algorithm.max_grad_norm"
            )


def _merged(values: Array) -> Array:
    return values.reshape(-1, *values.shape[2:])
