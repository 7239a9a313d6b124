"""Taking the actions of a stored episode again."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.types import Array

ACTIONS = "actions"
"""Parameter [B, T, ...]: the actions of every task's episode."""


class RecordedActor(Actor):
    """Takes the actions that its parameters hold. See Actor."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._recorded = np.moveaxis(setup.params.params[ACTIONS], 0, 1).astype(self.actions.dtype)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, A] float32 or [n] int64; see Actor."""
        return self._take(t, rows, self._recorded[t, rows])
