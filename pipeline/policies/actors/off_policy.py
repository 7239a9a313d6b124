"""Actors for off-policy learners: tanh-Gaussian, optionally conditioned on a latent variable, and epsilon-greedy."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.inference import check_shapes
from metaloom.pipeline.types import Array, Params

BELIEF_MEAN, BELIEF_VARIANCE = "belief.mean", "belief.variance"


def draw_latents(setup: ActorSetup) -> Array | None:
    """Draw a latent variable per episode from its task's posterior, [B, E, Z] float32; None without a posterior.

    Deterministic actions also depend on a sampled latent variable, as in PEARL.
    """
    params = setup.params.params
    if BELIEF_MEAN not in params:
        return None
    mean, std = params[BELIEF_MEAN], np.sqrt(params[BELIEF_VARIANCE])
    B, Z = mean.shape
    noise = np.empty((B, setup.num_rows, Z), np.float32)
    for b, e in np.ndindex(B, setup.num_rows):
        noise[b, e] = setup.belief_rng(b, e).standard_normal(Z, np.float32)
    return mean[:, None] + std[:, None] * noise


def latent_size(params: Params) -> int:
    """Return the posterior's latent size Z, or 0 if the parameters contain none. Raises ValueError if it is invalid."""
    named = [params[name] for name in (BELIEF_MEAN, BELIEF_VARIANCE) if name in params]
    if not named:
        return 0
    size = named[0].shape[-1]
    check_shapes(params, {BELIEF_MEAN: (size,), BELIEF_VARIANCE: (size,)})
    smallest = params[BELIEF_VARIANCE].min()
    if smallest < 0:
        raise ValueError(f"policy parameter {BELIEF_VARIANCE}: got {smallest}; expected variances of 0 or more")
    return size


POLICY_NETWORK = "policy_network"
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0  # bounds to which log standard deviations are clipped


class TanhGaussianActor(Actor):
    """Actor that samples actions as tanh(mean + std * noise), or takes tanh(mean) if `rngs` is None.

    Haarnoja et al. 2018, arXiv:1801.01290, appendix C. If the parameters contain a posterior, the network's input
    includes a latent variable drawn once per episode (Rakelly et al. 2019, arXiv:1903.08254).
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
        self._observed[:] = observations.reshape(self._observed.shape)
        _, N, A = self.actions.shape
        outputs = self._network.outputs().reshape(N, 2 * A)
        # Contiguous copies: numpy may round exp and tanh differently on strided arrays.
        mean = outputs[rows, :A]
        log_std = np.clip(outputs[rows, A:], MIN_LOG_STD, MAX_LOG_STD)
        self._means[t, rows] = mean
        self._log_stds[t, rows] = log_std
        self.actions[t, rows] = actions = np.tanh(mean + np.exp(log_std) * self._noise[t].reshape(N, A)[rows])
        return actions


Q_NETWORK = "q_network"
EPSILON = "epsilon"


class QValuesActor(Actor):
    """Epsilon-greedy actor, which takes the (first) action of highest Q-value or, with probability ε, a random action.

    ε is a parameter [B]; it is 0 if `rngs` is None. See Actor.
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
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        values = self._network.outputs().reshape(self._values[t].shape)[rows]
        actions: Array = np.where(self._explores[t, rows], self._random_actions[t, rows], values.argmax(-1))
        self._values[t, rows] = values
        return self._take(t, rows, actions)
