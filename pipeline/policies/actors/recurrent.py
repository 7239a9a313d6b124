"""Acting with a memory of the trial."""

from typing import ClassVar

from metaloom.pipeline.policies.actors.categorical import CategoricalActor
from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.actors.gaussian import GaussianActor
from metaloom.pipeline.policies.remembering import CellAndHead, MakeNetwork, Memory, Remembering
from metaloom.pipeline.types import Array


class RecurrentActor(Actor):
    """Draws as the categorical or the Gaussian actor does, from outputs of a network with a memory. See Actor.

    Duan et al. 2016, arXiv:1611.02779: the network sees an observation, and the action, reward and end of the step
    before. What it remembers lasts from one episode to the next; with `setup.memory` None a trial begins.
    """

    make_network: ClassVar[MakeNetwork] = CellAndHead

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._remembering = Remembering(
            setup.config, setup.spaces, setup.params, setup.num_rows, setup.memory, self.make_network
        )
        kind = CategoricalActor if setup.spaces.num_actions else GaussianActor
        self._actor: Actor = kind(setup, self._remembering)
        self.actions = self._actor.actions
        self.behavior_by_step, self.behavior_by_task = self._actor.behavior_by_step, self._actor.behavior_by_task

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, ...]; see Actor."""
        actions = self._actor.act(t, observations, rows)
        self._remembering.keep(rows, actions)
        return actions

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """See Actor."""
        self._remembering.learn_of(rows, rewards, ended)

    @property
    def memory(self) -> Memory:
        """See Actor."""
        return self._remembering.memory

    def recall(self, memory: Memory) -> None:
        """See Actor."""
        self._remembering.memory = memory
