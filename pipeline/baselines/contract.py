"""Interface between baselines and sample processing."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from metaloom.pipeline.types import Array, ParallelMap, Params


class BaselineError(ArithmeticError):
    """Raised if a baseline has no finite fit."""


class Baseline(ABC):
    """A predictor of returns from observations."""

    @abstractmethod
    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        """Fit the baseline to each task's targets and return its predictions, [B, E, T] float64, zero in the padding.

        Args:
            observations: Observations, [B, E, T, O].
            targets: Discounted returns, or discounted rewards for DiCE, [B, E, T].
            mask: Mask, [B, E, T]: 1 for real steps; padding does not affect the fit.
            seed: Seed for the fit's random draws.
            parallel: Map over tasks; the result does not depend on it.

        Raises:
            BaselineError: no finite fit was found; the message names the task.
        """

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        """Fit like `fit_predict` and return the parameters [B, ...], keyed by name. By default, there are none."""
        return {}


def by_task(
    fit: Callable[[Array, Array, Array], Array], observations: Array, targets: Array, mask: Array, parallel: ParallelMap
) -> Array:
    """Apply `fit` to each task's observations, targets and mask; return the stacked results, [B, ...]."""

    def work(b: int) -> Array:
        try:
            return fit(observations[b], targets[b], mask[b])
        except BaselineError as error:
            raise BaselineError(f"task {b}: {error}") from error

    return np.stack(list(parallel(work, range(len(mask)))))


def require_finite(observations: Array, targets: Array) -> None:
    """Raise BaselineError, naming the array, if observations or targets are not finite."""
    for name, values in (("observations", observations), ("returns", targets)):
        if not np.isfinite(values).all():
            raise BaselineError(f"{name} are not finite, so no baseline can be fitted; check the rollouts of this task")
