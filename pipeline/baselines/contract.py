"""What the processing of samples asks of a baseline."""

from typing import Protocol

from pipeline.types import Array


class BaselineError(ArithmeticError):
    """No finite fit was found for a baseline."""


class Baseline(Protocol):
    """Predicts returns from observations of one task."""

    def fit_predict(self, observations: Array, targets: Array, mask: Array) -> Array:
        """Fit to the targets of one task's episodes, and predict them.

        Args:
            observations: [E, T, O].
            targets: [E, T], usually discounted returns.
            mask: [E, T], 1 where a step is real; padding takes no part in the fit.

        Returns:
            [E, T] float64, zero on padding.

        Raises:
            BaselineError: no finite fit was found.
        """
        ...
