"""What an actor is made from, and what it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Array, TaskParams


class Actor(Protocol):
    """Actions of B tasks x E rows over T steps, each task under its own parameters.

    An actor draws the random numbers of all steps per task before the first one, so that no episode's end shifts
    another's.

    Attributes:
        actions: [T, B * E, ...], those taken so far.
        behavior_by_step: what the acting distribution was at every step so far: name -> [T, B * E, ...] float32.
        behavior_by_task: what it was all along: name -> [B, ...] float32, [B, E, ...] where episodes differ.
    """

    actions: Array
    behavior_by_step: dict[str, Array]
    behavior_by_task: dict[str, Array]

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, ...] of the rows [n] at step t, from all observations [B * E, O].

        Rows that have ended take part in the matrix products, to keep their shapes.
        """
        ...


@dataclass(frozen=True)
class ActorSetup:
    """What an actor is made from.

    Attributes:
        config: the policy.
        params: of every task.
        taken: [T, B * E, A] float32, is given all actions; A is 1 where they are choices.
        num_rows: E.
        num_choices: actions to choose from; 0 where they are numbers.
        rngs: B generators, from which each task's actions are drawn; None for the most likely actions.
        belief_rng: the generator from which the latent variable of a task's episode is drawn: (b, e) -> generator.
    """

    config: PolicyConfig
    params: TaskParams
    taken: Array
    num_rows: int
    num_choices: int
    rngs: Sequence[np.random.Generator] | None
    belief_rng: Callable[[int, int], np.random.Generator]

    @property
    def num_tasks(self) -> int:
        """B."""
        return self.taken.shape[1] // self.num_rows

    def normal_noise(self) -> Array:
        """[T, B, E, A] float32 standard normal numbers; zeros for the most likely actions."""
        T, _, A = self.taken.shape
        if self.rngs is None:
            return np.zeros((T, self.num_tasks, self.num_rows, A), np.float32)
        return self.drawn(lambda rng: rng.standard_normal((T, self.num_rows, A), np.float32))

    def drawn(self, draw: Callable[[np.random.Generator], Array]) -> Array:
        """[T, B, E, ...], from draws [T, E, ...] with the generator of each task."""
        assert self.rngs is not None
        return np.stack([draw(rng) for rng in self.rngs], axis=1)
