"""Returns by class of task: the mean of each class, and the mean in which every class counts alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.types import Array

BALANCED = "balanced"
"""What the mean over classes is called beside them; no class has this name."""


class Estimate(NamedTuple):
    """A mean with its standard error; NaN where there is none."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class ClassReturns:
    """Returns of some tasks by class.

    Attributes:
        names: of the C classes.
        num_tasks: of each.
        estimates: of each class, the mean over its tasks of their mean returns, and its standard error over tasks:
            s / √n with n - 1 in s. Without a task there is no mean, with one task no standard error.
    """

    names: tuple[str, ...]
    num_tasks: tuple[int, ...]
    estimates: tuple[Estimate, ...]

    @property
    def balanced(self) -> Estimate:
        """The mean (1/C) Σ m_c of the classes' means, whatever was drawn, and its standard error (1/C) √(Σ se_c²)."""
        means, errors = zip(*self.estimates, strict=True)
        count = len(self.names)
        return Estimate(sum(means) / count, math.sqrt(sum(error**2 for error in errors)) / count)


def class_returns(task_returns: Array, classes: Array, names: Sequence[str]) -> ClassReturns:
    """Returns by class.

    Args:
        task_returns: [B] mean return of every task.
        classes: [B] the class of every task.
        names: of the C classes.
    """
    groups = [np.asarray(task_returns[classes == c], np.float64) for c in range(len(names))]
    estimates = tuple(
        Estimate(
            float(values.mean()) if len(values) else math.nan,
            float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
        )
        for values in groups
    )
    return ClassReturns(tuple(names), tuple(map(len, groups)), estimates)
