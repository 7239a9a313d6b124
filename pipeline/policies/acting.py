"""Acting with a policy in rollouts, for Gaussian and categorical policies: numpy only, in fixed shapes.

Both draw the random numbers of all steps per task before the first one, so that no episode's end shifts another's.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipeline.policies.config import PolicyConfig
from pipeline.policies.inference import GaussianInference, NetworkInference, check_network, check_params
from pipeline.types import Array, Params, TaskParams

LOGITS_NETWORK = "logits_network"


class Actor(Protocol):
    """Actions of B tasks x E rows over T steps, each task under its own parameters.

    Attributes:
        actions: [T, B * E, ...], those taken so far.
    """

    actions: Array

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, ...] of the rows [n] at step t, from all observations [B * E, O].

        Rows that have ended take part in the matrix products, to keep their shapes.
        """
        ...

    @property
    def behavior_by_step(self) -> dict[str, Array]:
        """What the acting distribution was at every step: name -> [T, B * E, ...]."""
        ...

    @property
    def behavior_by_task(self) -> dict[str, Array]:
        """What it was all along: name -> [B, ...]."""
        ...


class GaussianActor:
    """Actions mean + std * noise; the mean where there is nothing to draw from."""

    def __init__(
        self,
        config: PolicyConfig,
        params: TaskParams,
        taken: Array,
        num_rows: int,
        rngs: Sequence[np.random.Generator] | None,
    ) -> None:
        """An actor before its first step.

        Args:
            config: the policy.
            params: of every task.
            taken: [T, B * E, A] float32, is given all actions.
            num_rows: E.
            rngs: where each task's noise comes from; None to act without any.
        """
        self._policy = GaussianInference(config, params, num_rows)
        B, A = self._policy.log_std.shape
        self._noise = np.zeros((len(taken), B, num_rows, A), np.float32)
        for b, rng in enumerate(rngs or ()):
            self._noise[:, b] = rng.standard_normal((len(taken), num_rows, A), np.float32)
        self._noise *= np.exp(self._policy.log_std)[:, None, :]
        self.actions = taken
        self._means = np.zeros_like(taken)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Float32 actions [n, A]; see Actor."""
        self._policy.inputs[:] = observations.reshape(self._policy.inputs.shape)
        mean, noise = self._policy.mean(), self._noise[t]
        N = self.actions.shape[1]
        if len(rows) == N:
            self._means[t].reshape(mean.shape)[:] = mean
            np.add(mean, noise, out=self.actions[t].reshape(mean.shape))
            return self.actions[t]
        mean, noise = mean.reshape(N, -1)[rows], noise.reshape(N, -1)[rows]
        self._means[t, rows] = mean
        self.actions[t, rows] = actions = mean + noise
        return actions

    @property
    def behavior_by_step(self) -> dict[str, Array]:
        """The means; see Actor."""
        return {"mean": self._means}

    @property
    def behavior_by_task(self) -> dict[str, Array]:
        """The log standard deviations; see Actor."""
        return {"log_std": np.ascontiguousarray(self._policy.log_std)}


class CategoricalActor:
    """Actions are drawn by inverting the distribution function at a uniform number.

    Where there is nothing to draw from it takes the most probable one, the first of them if there are several.
    """

    def __init__(
        self,
        config: PolicyConfig,
        params: TaskParams,
        taken: Array,
        num_rows: int,
        rngs: Sequence[np.random.Generator] | None,
    ) -> None:
        """An actor before its first step.

        Args:
            config: the policy.
            params: of every task.
            taken: [T, B * E, 1] float32, is given all actions.
            num_rows: E.
            rngs: where each task's draws come from; None for the most probable actions.
        """
        self._network = NetworkInference(LOGITS_NETWORK, config, params, num_rows)
        self._taken = taken
        T, N = taken.shape[:2]
        self._uniform = None
        if rngs is not None:
            self._uniform = np.empty((T, len(rngs), num_rows), np.float32)
            for b, rng in enumerate(rngs):
                self._uniform[:, b] = rng.random((T, num_rows), np.float32)
        self.actions = np.zeros((T, N), np.int64)
        self._log_probs = np.zeros((T, N, self._network.output_size), np.float32)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Int64 actions [n]; see Actor."""
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        N = self.actions.shape[1]
        log_probs = log_softmax(self._network.outputs().reshape(N, -1))
        actions = self._choose(t, log_probs)
        self.actions[t, rows] = self._taken[t, rows, 0] = actions[rows]
        self._log_probs[t, rows] = log_probs[rows]
        return actions[rows]

    def _choose(self, t: int, log_probs: Array) -> Array:
        if self._uniform is None:
            return log_probs.argmax(-1)
        below = np.cumsum(np.exp(log_probs), axis=-1)
        # Rounding may leave the last sum below 1, so the last action takes whatever is above the others.
        return (self._uniform[t].reshape(-1, 1) >= below[:, :-1]).sum(-1)

    @property
    def behavior_by_step(self) -> dict[str, Array]:
        """The log-probabilities of all actions; see Actor."""
        return {"log_probs": self._log_probs}

    @property
    def behavior_by_task(self) -> dict[str, Array]:
        """Nothing; see Actor."""
        return {}


def check_actor_params(
    config: PolicyConfig, params: Params, observation_size: int, action_size: int, num_choices: int
) -> None:
    """Refuse parameters [B, ...] that do not fit an environment with so many choices, or 0 and an action size.

    Raises:
        ValueError: naming the parameter, its shape and the one required.
    """
    if num_choices:
        check_network(LOGITS_NETWORK, config, params, observation_size, num_choices)
    else:
        check_params(config, params, observation_size, action_size)


def log_softmax(logits: Array) -> Array:
    """Normalized log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
