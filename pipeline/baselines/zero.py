"""No baseline: advantages are returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.types import Array, ParallelMap, Params


@dataclass(frozen=True)
class ZeroBaseline:
    """Predicts zero everywhere."""

    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        """Zeros [B, E, T], whatever the targets; see Baseline."""
        return np.zeros_like(targets, dtype=np.float64)

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        """No parameters; see Baseline."""
        return {}
