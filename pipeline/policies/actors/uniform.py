"""Acting at random, to fill a replay memory before there is anything to learn from."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.types import Array


class UniformActor(Actor):
    """Draws every action with equal probability, of [-1, 1], a tanh's range, or of the discrete ones. See Actor."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        T, N, A = setup.taken.shape
        E = setup.num_rows
        if setup.spaces.num_actions:
            self._drawn = setup.drawn(lambda rng: rng.integers(setup.spaces.num_actions, size=(T, E))).reshape(T, N)
        else:
            self._drawn = setup.drawn(lambda rng: 2 * rng.random((T, E, A), np.float32) - 1).reshape(T, N, A)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, A] float32 or [n] int64; see Actor."""
        return self._take(t, rows, self._drawn[t, rows])
