"""Acting on normalized observations and rewards."""

import numpy as np

from metaloom.pipeline.estimation.normalization import Normalization
from metaloom.pipeline.policies.actors.contract import Actor
from metaloom.pipeline.policies.remembering import Memory
from metaloom.pipeline.types import Array


class NormalizingActor(Actor):
    """An actor that sees normalized observations and, where it has a memory, scaled rewards. See Actor.

    Attributes:
        actor: acts on what is normalized.
    """

    def __init__(self, actor: Actor, normalization: Normalization, num_rows: int) -> None:
        self.actor, self._normalization, self._num_rows = actor, normalization, num_rows
        self.actions = actor.actions
        self.behavior_by_step, self.behavior_by_task = actor.behavior_by_step, actor.behavior_by_task

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, ...]; see Actor."""
        by_task = observations.reshape(-1, self._num_rows, observations.shape[-1])
        normalized = self._normalization.observations(by_task)
        return self.actor.act(t, normalized.reshape(observations.shape), rows)

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """See Actor."""
        tasks = rows // self._num_rows
        std = self._normalization.reward_std
        scaled = rewards if std is None else Normalization(reward_std=std[tasks]).rewards(np.asarray(rewards))
        self.actor.learn_of(rows, scaled, ended)

    @property
    def memory(self) -> Memory | None:
        """See Actor."""
        return self.actor.memory

    def recall(self, memory: Memory) -> None:
        """See Actor."""
        self.actor.recall(memory)
