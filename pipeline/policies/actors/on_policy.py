"""Actors for on-policy learners: Gaussian, categorical, recurrent, posterior-conditioned and normalizing."""

from typing import ClassVar

import numpy as np

from metaloom.pipeline.estimation.normalization import Normalization
from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, MEAN_NETWORK, Inference, log_softmax
from metaloom.pipeline.policies.posterior import POSTERIOR_LOG_STD, POSTERIOR_MEAN, PosteriorNetwork
from metaloom.pipeline.policies.remembering import CellAndHead, Memory, Remembering
from metaloom.pipeline.types import Array


class GaussianActor(Actor):
    """Actor that samples actions as mean + std * noise, or takes the mean if `rngs` is None."""

    def __init__(self, setup: ActorSetup, network: Inference | None = None) -> None:
        super().__init__(setup)
        self._network = network or setup.network(MEAN_NETWORK, setup.spaces.action_size)
        log_std = np.maximum(setup.params.params["log_std"], np.float32(np.log(setup.config.min_std)))
        self._noise = setup.normal_noise()
        self._noise *= np.exp(log_std)[:, None, :]
        self._means = self._record("mean", setup.spaces.action_size)
        self.behavior_by_task["log_std"] = np.ascontiguousarray(log_std)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
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


class CategoricalActor(Actor):
    """Actor that samples discrete actions by inverting the cumulative distribution function. See Actor.

    If `rngs` is None, it takes the most probable action (the first one in a tie).
    """

    def __init__(self, setup: ActorSetup, network: Inference | None = None) -> None:
        super().__init__(setup)
        self._network = network or setup.network(LOGITS_NETWORK, setup.spaces.num_actions)
        self._uniform, T = None, len(setup.taken)
        if setup.rngs is not None:
            self._uniform = setup.drawn(lambda rng: rng.random((T, setup.num_rows), np.float32))
        self._log_probs = self._record("log_probs", self._network.output_size)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        self._network.inputs[:] = observations.reshape(self._network.inputs.shape)
        log_probs = log_softmax(self._network.outputs().reshape(len(observations), -1))
        if self._uniform is None:
            actions = log_probs.argmax(-1)
        else:
            below = np.cumsum(np.exp(log_probs), axis=-1)
            # The last cumulative sum may be below 1 because of rounding, so the last action takes the remainder.
            actions = (self._uniform[t].reshape(-1, 1) >= below[:, :-1]).sum(-1)
        self._log_probs[t, rows] = log_probs[rows]
        return self._take(t, rows, actions[rows])


class RecurrentActor(Actor):
    """Actor with a recurrent network that outputs categorical or Gaussian action distributions. See Actor.

    Duan et al. 2016, arXiv:1611.02779: the inputs are an observation and the previous action, reward and episode end.
    The memory persists across episodes; if `setup.memory` is None, a new trial begins.
    """

    make_network: ClassVar[type[CellAndHead | PosteriorNetwork]] = CellAndHead

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._remembering = Remembering(
            setup.config, setup.spaces, setup.params, setup.num_rows, setup.memory, self.make_network
        )
        kind = CategoricalActor if setup.spaces.num_actions else GaussianActor
        self._actor: Actor = kind(setup, self._remembering)
        self.actions: Array = self._actor.actions
        self.behavior_by_step: dict[str, Array] = self._actor.behavior_by_step
        self.behavior_by_task: dict[str, Array] = self._actor.behavior_by_task

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        actions = self._actor.act(t, observations, rows)
        self._remembering.keep(rows, actions)
        return actions

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        self._remembering.learn_of(rows, rewards, ended)

    @property
    def memory(self) -> Memory:
        return self._remembering.memory

    def recall(self, memory: Memory) -> None:
        self._remembering.memory = memory


class PosteriorActor(RecurrentActor):
    """Actor conditioned on a recurrent encoder's posterior, which it records. See RecurrentActor.

    Zintgraf et al. 2020, arXiv:1910.08348.
    """

    make_network: ClassVar[type[CellAndHead | PosteriorNetwork]] = PosteriorNetwork

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        network = self._remembering.network
        assert isinstance(network, PosteriorNetwork)
        self._network, Z = network, network.latent_size
        self._means, self._log_stds = (self._record(name, Z) for name in (POSTERIOR_MEAN, POSTERIOR_LOG_STD))

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        actions = super().act(t, observations, rows)
        Z = self._network.latent_size
        posterior = self._network.posterior.reshape(-1, 2 * Z)[rows]
        self._means[t, rows], self._log_stds[t, rows] = posterior[:, :Z], posterior[:, Z:]
        return actions


class NormalizingActor(Actor):
    """Wrapper that gives an actor normalized observations and, for its memory, scaled rewards."""

    def __init__(self, actor: Actor, normalization: Normalization, num_rows: int) -> None:
        self.actor: Actor = actor
        self._normalization, self._num_rows = normalization, num_rows
        self.actions: Array = actor.actions
        self.behavior_by_step: dict[str, Array] = actor.behavior_by_step
        self.behavior_by_task: dict[str, Array] = actor.behavior_by_task

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        by_task = observations.reshape(-1, self._num_rows, observations.shape[-1])
        normalized = self._normalization.observations(by_task)
        return self.actor.act(t, normalized.reshape(observations.shape), rows)

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        tasks = rows // self._num_rows
        std = self._normalization.reward_std
        scaled = rewards if std is None else Normalization(reward_std=std[tasks]).rewards(np.asarray(rewards))
        self.actor.learn_of(rows, scaled, ended)

    @property
    def memory(self) -> Memory | None:
        return self.actor.memory

    def recall(self, memory: Memory) -> None:
        self.actor.recall(memory)
