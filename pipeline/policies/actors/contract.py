"""Acting in rollouts: the contract of actors, the ingredients of one, and the actors that need no network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import Inference, network_inference
from metaloom.pipeline.policies.remembering import Memory
from metaloom.pipeline.types import Array, TaskParams


@dataclass(frozen=True)
class ActorSetup:
    """The ingredients of an actor.

    Attributes:
        config: The policy.
        params: Parameters of every task.
        taken: [T, B * E, A] float32, is given all actions; A is 1 where they are discrete.
        num_rows: E.
        spaces: Sizes of the environment.
        rngs: B generators, from which each task's actions are drawn; None for the most likely actions.
        belief_rng: The generator from which the latent variable of a task's episode is drawn: (b, e) -> generator.
        memory: Memory of the episodes before, for an actor with a memory; None where a trial begins.
    """

    config: PolicyConfig
    params: TaskParams
    taken: Array
    num_rows: int
    spaces: Spaces
    rngs: Sequence[np.random.Generator] | None
    belief_rng: Callable[[int, int], np.random.Generator]
    memory: Memory | None = None

    @property
    def num_tasks(self) -> int:
        """Number of tasks B."""
        return self.taken.shape[1] // self.num_rows

    def network(self, prefix: str, output_size: int, *, extra_size: int = 0, activation: str = "tanh") -> Inference:
        """Set up the forward pass of one of the policy's networks; arguments as for PolicyConfig.network_spec."""
        spec = self.config.network_spec(self.spaces, output_size, extra_size=extra_size, activation=activation)
        return network_inference(prefix, spec, self.params, self.num_rows)

    def normal_noise(self) -> Array:
        """Draw standard normal noise, [T, B, E, A] float32; zeros for the most likely actions."""
        T, _, A = self.taken.shape
        if self.rngs is None:
            return np.zeros((T, self.num_tasks, self.num_rows, A), np.float32)
        return self.drawn(lambda rng: rng.standard_normal((T, self.num_rows, A), np.float32))

    def drawn(self, draw: Callable[[np.random.Generator], Array]) -> Array:
        """Stack draws [T, E, ...] from the generator of each task: [T, B, E, ...]."""
        assert self.rngs is not None
        return np.stack([draw(rng) for rng in self.rngs], axis=1)


class Actor(ABC):
    """Actions of B tasks x E rows over T steps, each task under its own parameters.

    An actor draws the random numbers of all steps per task before the first one, so that no episode's end shifts
    another's.

    Attributes:
        actions: [T, B * E, ...], actions so far.
        behavior_by_step: Acting distribution at every step so far: name -> [T, B * E, ...] float32.
        behavior_by_task: Acting distribution of all steps: name -> [B, ...] float32, [B, E, ...] where episodes differ.
    """

    def __init__(self, setup: ActorSetup) -> None:
        T, N, _ = setup.taken.shape
        self._taken = setup.taken
        self.actions: Array = np.zeros((T, N), np.int64) if setup.spaces.num_actions else setup.taken
        self.behavior_by_step: dict[str, Array] = {}
        self.behavior_by_task: dict[str, Array] = {}

    @abstractmethod
    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Return actions [n, ...] for the rows [n] at step t, given all observations [B * E, O].

        Rows that have ended take part in the matrix products, to keep their shapes.
        """

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """Receive the outcome of the last actions.

        Args:
            rows: [n] that have acted.
            rewards: [n] float32, as they are stored.
            ended: [n] bool, the task or the step limit ended the episode.
        """
        del rows, rewards, ended

    @property
    def memory(self) -> Memory | None:
        """Memory of the rows; None of actors without a memory."""
        return None

    def recall(self, memory: Memory) -> None:
        """Continue from the memory of another actor of the same rows; only for actors with a memory."""
        raise NotImplementedError(f"{type(self).__name__} keeps no memory ({memory.state.shape})")

    def _record(self, name: str, size: int) -> Array:
        """Return zeros [T, N, size] for the acting distribution at every step."""
        self.behavior_by_step[name] = np.zeros((*self._taken.shape[:2], size), np.float32)
        return self.behavior_by_step[name]

    def _take(self, t: int, rows: Array, actions: Array) -> Array:
        """Keep the actions [n, ...] of some rows."""
        self.actions[t, rows] = actions
        self._taken[t, rows] = actions.reshape(len(rows), -1)
        return actions


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
        return self._take(t, rows, self._drawn[t, rows])


ACTIONS = "actions"
"""Parameter [B, T, ...]: the actions of every task's episode."""


class RecordedActor(Actor):
    """Takes the actions that its parameters hold. See Actor."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._recorded = np.moveaxis(setup.params.params[ACTIONS], 0, 1).astype(self.actions.dtype)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        return self._take(t, rows, self._recorded[t, rows])
