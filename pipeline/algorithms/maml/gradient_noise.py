"""Signal and noise of the meta-gradient: whether the tasks of an iteration agree on where to go.

The meta-gradient ḡ = (1/B) Σ g_i is a mean over the B tasks that an iteration drew. Other tasks and episodes would give
another one; how much another, the gradients g_i of the single tasks tell.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.types import Array, Metrics

STANDARD_ERROR, SPLIT_COSINE = "meta_gradient_standard_error", "meta_gradient_split_cosine"


@dataclass(frozen=True)
class TaskSpread:
    """Sums over the gradients g_i of single tasks, i = 0 ... B - 1.

    Attributes:
        even: name -> Σ g_i over i = 0, 2, 4, ...
        squared_norms: [B] float64, ‖g_i‖².
    """

    even: Mapping[str, Array]
    squared_norms: Array


def noise_metrics(mean: Mapping[str, Array], spread: TaskSpread) -> Metrics:
    """The standard error of the meta-gradient over tasks, and how far two halves of the tasks agree.

    Returns:
        `meta_gradient_standard_error`: √(s²/B) with s² = (Σ ‖g_i‖² - B ‖ḡ‖²) / (B - 1), the root of the summed squares
            of the standard errors of all elements. Where the tasks' gradients are noise around zero, ‖ḡ‖ is as large.
        `meta_gradient_split_cosine`: of the angle between the sums over even and over odd tasks; 0 where one is zero.
    """
    B = len(spread.squared_norms)
    total = _flat(mean) * B
    even = _flat(spread.even)
    odd = total - even
    variance = (float(spread.squared_norms.sum()) - float(total @ total) / B) / (B - 1)
    lengths = math.sqrt(float(even @ even) * float(odd @ odd))
    return {
        # Equal gradients leave a rounding error, which may be below 0.
        STANDARD_ERROR: math.sqrt(max(variance, 0.0) / B),
        SPLIT_COSINE: float(even @ odd) / lengths if lengths else 0.0,
    }


def _flat(values: Mapping[str, Array]) -> Array:
    return np.concatenate([value.ravel().astype(np.float64) for value in values.values()])
