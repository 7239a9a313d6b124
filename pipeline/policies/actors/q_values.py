"""Acting by the values of discrete actions."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.types import Array

Q_NETWORK = "q_network"
EPSILON = "epsilon"


class QValuesActor(Actor):
    """Takes the action of the highest value, the first of several; with probability epsilon a random one.

    Epsilon is a parameter [B]; where there is nothing to draw from, it is 0. See Actor.
    """

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        num_actions = setup.spaces.num_actions
        self._network = setup.network(Q_NETWORK, num_actions, activation="relu")
        T, N, _ = setup.taken.shape
        epsilon = np.zeros(setup.num_tasks, np.float32)
        self._explores = np.zeros((T, N), np.bool_)
        self._random_actions = np.zeros((T, N), np.int64)
        if setup.rngs is not None:
            epsilon[:] = setup.params.params[EPSILON]
            shape = (T, setup.num_rows)
            uniform = setup.drawn(lambda rng: rng.random(shape, np.float32))
            self._explores = (uniform < epsilon[:, None]).reshape(T, N)
            self._random_actions = setup.drawn(lambda rng: rng.integers(num_actions, size=shape)).reshape(T, N)
        self._values = self._record("action_values", num_actions)
        self.behavior_by_task[EPSILON] = epsilon

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Int64 actions [n]; see Actor."""
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        values = self._network.outputs().reshape(self._values[t].shape)[rows]
        actions: Array = np.where(self._explores[t, rows], self._random_actions[t, rows], values.argmax(-1))
        self._values[t, rows] = values
        return self._take(t, rows, actions)
