"""Checks that values are finite; the error names the array and the task."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.types import Array


class NumericalError(ArithmeticError):
    """An input, loss, gradient or parameter is not finite."""


def require_finite(values: Mapping[str, Tensor], first_task: int, advice: str) -> None:
    """Raise unless all values are finite.

    Raises:
        NumericalError: naming the first array, and the first task in it, that is not finite.
    """
    for name, value in values.items():
        finite = torch.isfinite(value.detach())
        if not finite.all():
            bad = int((~finite).reshape(len(value), -1).any(1).nonzero()[0])
            found = value.detach()[bad][~finite[bad]].reshape(-1)[0].item()
            raise NumericalError(f"{name} of task {first_task + bad} holds {found}; required finite numbers. {advice}")


def require_finite_params(params: Mapping[str, Mapping[str, Array]], *, stage: str, advice: str) -> None:
    """Raise unless all parameters are finite after an update.

    Raises:
        NumericalError: naming the first network that has a parameter which is not finite.
    """
    for name, arrays in params.items():
        if not all(np.isfinite(value).all() for value in arrays.values()):
            raise NumericalError(
                f"{stage}: parameters of {name} are not finite after the update; required finite numbers. {advice}"
            )
