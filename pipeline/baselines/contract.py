"""The contract between baselines and the processing of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from metaloom.pipeline.types import Array, ParallelMap, Params

Fit = Callable[[Array, Array, Array], Array]
"""Function from one task's observations [E, T, O], targets [E, T] and mask [E, T] to predictions [E, T], or
parameters."""


class BaselineError(ArithmeticError):
    """Raised when no finite fit of a baseline is found."""


class Baseline(ABC):
    """A predictor of returns from observations."""

    @abstractmethod
    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        """Fit the targets of every task's episodes and return the predictions.

        Args:
            observations: [B, E, T, O].
            targets: [B, E, T], discounted returns, or discounted rewards for DiCE.
            mask: [B, E, T], 1 where a step is real; padding takes no part in the fit.
            seed: Seed of the fit's random draws.
            parallel: Map over tasks; the result does not depend on it.

        Returns:
            [B, E, T] float64, zero on padding.

        Raises:
            BaselineError: no finite fit was found; names the task.
        """

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        """Fit as `fit_predict` does and return the parameters [B, ...] by name; by default none.

        Raises:
            BaselineError: no finite fit was found; names the task.
        """
        return {}


def by_task(fit: Fit, observations: Array, targets: Array, mask: Array, parallel: ParallelMap) -> Array:
    """Apply a fit task by task; return the stacked predictions or parameters."""

    def work(b: int) -> Array:
        try:
            return fit(observations[b], targets[b], mask[b])
        except BaselineError as error:
            raise BaselineError(f"task {b}: {error}") from error

    return np.stack(list(parallel(work, range(len(mask)))))


def require_finite(observations: Array, targets: Array) -> None:
    """Reject data that no baseline can fit.

    Raises:
        BaselineError: names the array that is not finite.
    """
    for name, values in (("observations", observations), ("returns", targets)):
        if not np.isfinite(values).all():
            raise BaselineError(f"{name} are not finite, so no baseline can be fitted; check the rollouts of this task")
