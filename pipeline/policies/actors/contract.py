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
    """Constructor arguments of actors."""

    config: PolicyConfig
    params: TaskParams
    taken: Array  # output array for all actions, [T, B * E, A] float32; A is 1 for discrete actions
    num_rows: int  # number of rows (parallel episodes) E per task
    spaces: Spaces
    rngs: Sequence[np.random.Generator] | None  # action generators of the B tasks; None: take the most likely actions
    belief_rng: Callable[[int, int], np.random.Generator]  # (b, e) -> generator for episode e of task b's latent
    memory: Memory | None = None  # memory of previous episodes; None at the beginning of a trial or without memory

    @property
    def num_tasks(self) -> int:
        """Number of tasks B."""
        return self.taken.shape[1] // self.num_rows

    def network(self, prefix: str, output_size: int, *, extra_size: int = 0, activation: str = "tanh") -> Inference:
        """Set up the forward pass of one of the policy's networks; see PolicyConfig.network_spec for the arguments."""
        spec = self.config.network_spec(self.spaces, output_size, extra_size=extra_size, activation=activation)
        return network_inference(prefix, spec, self.params, self.num_rows)

    def normal_noise(self) -> Array:
        """Draw standard normal noise, [T, B, E, A] float32; zeros if the most likely actions are taken."""
        T, _, A = self.taken.shape
        if self.rngs is None:
            return np.zeros((T, self.num_tasks, self.num_rows, A), np.float32)
        return self.drawn(lambda rng: rng.standard_normal((T, self.num_rows, A), np.float32))

    def drawn(self, draw: Callable[[np.random.Generator], Array]) -> Array:
        """Draw an array [T, E, ...] with each task's generator, and stack the arrays to [T, B, E, ...]."""
        assert self.rngs is not None
        return np.stack([draw(rng) for rng in self.rngs], axis=1)


class Actor(ABC):
    """Base class for actors, which choose actions for B tasks x E rows over T steps, with separate parameters per task.

    An actor draws each task's random numbers for all steps in advance, so that the end of one episode does not affect
    the others.

    Attributes:
        actions: Actions so far, shape [T, B * E, ...].
        behavior_by_step: Parameters of the behavior policy at each step so far, keyed by name, [T, B * E, ...] float32.
        behavior_by_task: Parameters of the behavior policy that are constant over steps, keyed by name, [B, ...]
            float32, or [B, E, ...] if episodes differ.
        memory: Memory of all rows; None for actors without memory.
    """

    memory: Memory | None = None

    def __init__(self, setup: ActorSetup) -> None:
        T, N, _ = setup.taken.shape
        self._taken = setup.taken
        self.actions: Array = np.zeros((T, N), np.int64) if setup.spaces.num_actions else setup.taken
        self.behavior_by_step: dict[str, Array] = {}
        self.behavior_by_task: dict[str, Array] = {}

    @abstractmethod
    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Return actions [n, ...] for the active rows [n] at step t, given the observations of all rows [B * E, O].

        Rows whose episode has ended still take part in matrix products, so that shapes stay constant.
        """

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """Receive the reward of each row that acted last, and whether its episode has ended, [n] each."""
        del rows, rewards, ended

    def recall(self, memory: Memory) -> None:
        """Continue from another actor's memory of the same rows; only for actors with memory."""
        raise NotImplementedError(f"{type(self).__name__} keeps no memory ({memory.state.shape})")

    def _record(self, name: str, size: int) -> Array:
        """Register and return a zero array [T, N, size] for a behavior parameter that is recorded at each step."""
        self.behavior_by_step[name] = np.zeros((*self._taken.shape[:2], size), np.float32)
        return self.behavior_by_step[name]

    def _take(self, t: int, rows: Array, actions: Array) -> Array:
        """Record and return the actions [n, ...] of rows [n] at step t."""
        self.actions[t, rows] = actions
        self._taken[t, rows] = actions.reshape(len(rows), -1)
        return actions


class UniformActor(Actor):
    """Actor that draws actions uniformly from [-1, 1], the range of tanh, or from the discrete actions."""

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
"""Name of the parameter [B, T, ...] with the recorded actions of each task's episode."""


class RecordedActor(Actor):
    """Actor that replays the actions stored in its parameters."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._recorded = np.moveaxis(setup.params.params[ACTIONS], 0, 1).astype(self.actions.dtype)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        return self._take(t, rows, self._recorded[t, rows])
