"""Who is told where a rollout is, so that it can be known if the process does not live to tell."""

import numpy as np

from metaloom.pipeline.types import Array
from metaloom.stages.rollouts.faults import RolloutPosition


class RolloutWatch:
    """Is told where a rollout is; this one does not listen."""

    def actions(self, shape: tuple[int, int, int], position: RolloutPosition) -> Array:
        """Zeros [T, N, A] float32, into which the episodes from a position on write their actions.

        They are copied when the episodes have ended.
        """
        return np.zeros(shape, np.float32)

    def entered(self, env_step: int | None) -> None:
        """The environments are about to be reset (None) or to take a step."""

    def left(self) -> None:
        """The environments have come back from that call."""

    def row(self, row: int) -> None:
        """The environment of a row is about to be called, where a loop calls one after the other."""


UNWATCHED = RolloutWatch()
