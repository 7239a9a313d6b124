"""Acting by a Gaussian that a tanh squashes into (-1, 1), on the state alone or also on a belief about the task."""

import numpy as np

from metaloom.pipeline.policies.actors.belief import draw_latents
from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.types import Array

POLICY_NETWORK = "policy_network"
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0
"""Between which a network's log standard deviations are clamped."""


class TanhGaussianActor(Actor):
    """Actions tanh(mean + std * noise); tanh(mean) where there is nothing to draw from. See Actor.

    Haarnoja et al. 2018, arXiv:1801.01290, appendix C. Where the parameters hold a belief, the network sees a latent
    variable behind the observation, drawn from the belief once per episode (Rakelly et al. 2019, arXiv:1903.08254).
    """

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        latents = draw_latents(setup)
        latent_size = 0 if latents is None else latents.shape[2]
        outputs = 2 * setup.spaces.action_size
        self._network = setup.network(POLICY_NETWORK, outputs, extra_size=latent_size, activation="relu")
        self._observed = self._network.inputs
        if latents is not None:
            self.behavior_by_task["latent"] = latents
            self._observed = self._network.inputs[:, :, :-latent_size]
            self._network.inputs[:, :, -latent_size:] = latents
        self._noise = setup.normal_noise()
        self._means = self._record("mean", setup.spaces.action_size)
        self._log_stds = self._record("log_stds", setup.spaces.action_size)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Float32 actions [n, A]; see Actor."""
        self._observed[:] = observations.reshape(self._observed.shape)
        _, N, A = self.actions.shape
        outputs = self._network.outputs().reshape(N, 2 * A)
        # Contiguous copies: numpy may compute exp and tanh otherwise where numbers lie apart.
        mean = outputs[rows, :A]
        log_std = np.clip(outputs[rows, A:], MIN_LOG_STD, MAX_LOG_STD)
        self._means[t, rows] = mean
        self._log_stds[t, rows] = log_std
        self.actions[t, rows] = actions = np.tanh(mean + np.exp(log_std) * self._noise[t].reshape(N, A)[rows])
        return actions
