"""The contract of actors, their constructor arguments, and actors without a network."""

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
    """Everything needed to construct an actor.

    Attributes:
        config: The policy.
        params: Parameters of every task.
        taken: [T, B * E, A] float32, output array for all actions; A is 1 for discrete actions.
        num_rows: E.
        spaces: Sizes of the environment.
        rngs: Generators of the B tasks' actions; None for the most likely actions.
        belief_rng: Function from (b, e) to the generator of the latent variable of task b's episode e.
        memory: Memory of previous episodes, for an actor with a memory; None at the beginning of a trial.
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

    An actor draws each task's random numbers for all steps in advance, so that the end of an episode does not affect
    others.

    Attributes:
        actions: [T, B * E, ...], actions so far.
        behavior_by_step: Acting distribution at every step so far: name -> [T, B * E, ...] float32.
        behavior_by_task: Acting distribution common to all steps: name -> [B, ...] float32, or [B, E, ...] if episodes
            differ.
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

        Ended rows still take part in matrix products, which keeps their shapes.
        """

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """Observe the outcome of the last actions.

        Args:
            rows: [n], rows that acted.
            rewards: [n] float32, as they are stored.
            ended: [n] bool, True if the task or the step limit ended the episode.
        """
        del rows, rewards, ended

    @property
    def memory(self) -> Memory | None:
        """Memory of the rows; None for actors without a memory."""
        return None

    def recall(self, memory: Memory) -> None:
        """Continue from the memory of another actor of the same rows; only for actors with a memory."""
        raise NotImplementedError(f"{type(self).__name__} keeps no memory ({memory.state.shape})")

    def _record(self, name: str, size: int) -> Array:
        """Return zeros [T, N, size] for the acting distribution at every step."""
        self.behavior_by_step[name] = np.zeros((*self._taken.shape[:2], size), np.float32)
        return self.behavior_by_step[name]

    def _take(self, t: int, rows: Array, actions: Array) -> Array:
        """Record the actions [n, ...] of some rows."""
        self.actions[t, rows] = actions
        self._taken[t, rows] = actions.reshape(len(rows), -1)
        return actions


class UniformActor(Actor):
    """Draws actions uniformly from [-1, 1], the range of tanh, or from the discrete actions. See Actor."""

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
"""Parameter [B, T, ...]: the recorded actions of every task's episode."""


class RecordedActor(Actor):
    """Replays the actions in its parameters. See Actor."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._recorded = np.moveaxis(setup.params.params[ACTIONS], 0, 1).astype(self.actions.dtype)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        return self._take(t, rows, self._recorded[t, rows])
