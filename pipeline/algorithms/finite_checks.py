"""Refusing numbers that are not finite, by the name of the array and of the task."""

from collections.abc import Mapping

import torch
from torch import Tensor


class NumericalError(ArithmeticError):
    """An input, loss, gradient or parameter is not finite."""


def require_finite(values: Mapping[str, Tensor], first_task: int, advice: str) -> None:
    """Raise unless all values are finite.

    Args:
        values: by name, [b, ...] with one entry per task.
        first_task: the number of the first of the b tasks.
        advice: what to do about it, the end of the message.

    Raises:
        NumericalError: naming the first array, and the first task in it, that is not finite.
    """
    for name, value in values.items():
        finite = torch.isfinite(value.detach())
        if not finite.all():
            bad = int((~finite).reshape(len(value), -1).any(1).nonzero()[0])
            found = value.detach()[bad][~finite[bad]].reshape(-1)[0].item()
            raise NumericalError(f"{name} of task {first_task + bad} holds {found}; required finite numbers. {advice}")
