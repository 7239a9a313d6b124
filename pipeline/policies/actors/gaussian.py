"""Acting by a Gaussian whose standard deviation does not depend on the state."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.inference import MEAN_NETWORK, Inference
from metaloom.pipeline.types import Array


class GaussianActor(Actor):
    """Actions mean + std * noise; the mean where there is nothing to draw from. See Actor."""

    def __init__(self, setup: ActorSetup, network: Inference | None = None) -> None:
        super().__init__(setup)
        self._network = network or setup.network(MEAN_NETWORK, setup.spaces.action_size)
        log_std = np.maximum(setup.params.params["log_std"], np.float32(np.log(setup.config.min_std)))
        self._noise = setup.normal_noise()
        self._noise *= np.exp(log_std)[:, None, :]
        self._means = self._record("mean", setup.spaces.action_size)
        self.behavior_by_task["log_std"] = np.ascontiguousarray(log_std)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Float32 actions [n, A]; see Actor."""
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        mean, noise = self._network.outputs(), self._noise[t]
        N = self.actions.shape[1]
        if len(rows) == N:
            self._means[t].reshape(mean.shape)[:] = mean
            np.add(mean, noise, out=self.actions[t].reshape(mean.shape))
            return self.actions[t]
        mean, noise = mean.reshape(N, -1)[rows], noise.reshape(N, -1)[rows]
        self._means[t, rows] = mean
        self.actions[t, rows] = actions = mean + noise
        return actions
