"""Acting by a categorical distribution over discrete actions."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, Inference, log_softmax
from metaloom.pipeline.types import Array


class CategoricalActor(Actor):
    """Actions are drawn by inverting the distribution function at a uniform number. See Actor.

    Where there is nothing to draw from it takes the most probable one, the first of them if there are several.
    """

    def __init__(self, setup: ActorSetup, network: Inference | None = None) -> None:
        super().__init__(setup)
        self._network = network or setup.network(LOGITS_NETWORK, setup.spaces.num_actions)
        self._uniform, T = None, len(setup.taken)
        if setup.rngs is not None:
            self._uniform = setup.drawn(lambda rng: rng.random((T, setup.num_rows), np.float32))
        self._log_probs = self._record("log_probs", self._network.output_size)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Int64 actions [n]; see Actor."""
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        log_probs = log_softmax(self._network.outputs().reshape(len(observations), -1))
        if self._uniform is None:
            actions = log_probs.argmax(-1)
        else:
            below = np.cumsum(np.exp(log_probs), axis=-1)
            # Rounding may leave the last sum below 1, so the last action takes whatever is above the others.
            actions = (self._uniform[t].reshape(-1, 1) >= below[:, :-1]).sum(-1)
        self._log_probs[t, rows] = log_probs[rows]
        return self._take(t, rows, actions[rows])
