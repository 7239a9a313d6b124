"""Errors of stages that cannot go on, with everything that reproduces them."""

from collections.abc import Mapping
from typing import Any

from metaloom.pipeline.types import Array


class StageFault(RuntimeError):
    """A stage met numbers or an environment that it cannot go on from.

    Attributes:
        about: where it happened and with what, as plain JSON data: stage, iteration, step, task, episode, ...
        arrays: the arrays that reproduce it by name, small enough to be kept.
    """

    def __init__(self, message: str, about: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None):
        super().__init__(message)
        self.about = dict(about or {})
        self.arrays = dict(arrays or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers send it over a wire; an exception's own way would lose all but the message.
        return type(self), (str(self), self.about, self.arrays)
