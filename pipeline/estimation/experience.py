"""Training data for actor-critics: rows of real steps, with bootstrapped values at truncated ends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.estimation.config import ValueTarget
from metaloom.pipeline.estimation.returns import discounted_returns, gae
from metaloom.pipeline.types import Array, EpisodeBatch, Params


@dataclass(frozen=True)
class StepRows:
    """Environment steps for training a policy and its critic."""

    observations: Array  # [n, O]
    actions: Array  # [n, A], or [n] int64
    old_log_prob: Array  # log-probabilities of the actions under the behavior policy, [n]
    advantages: Array  # [n]
    old_values: Array  # values from the critic before the update, [n]
    targets: Array  # targets of the critic, [n]

    def __getitem__(self, which: Array | slice) -> "StepRows":
        """Return the selected rows, in the given order."""
        return StepRows(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.actions)


class CriticEstimate(NamedTuple):
    """A critic's estimates for some episodes, [b, E, T] float64 each, zero in the padding; advantages are unscaled."""

    advantages: Array
    values: Array
    targets: Array


class Experience:
    """Episodes for training one policy and its critic, as N real steps, ordered by task, episode and step.

    Truncated episodes bootstrap from the value of the final state; terminated episodes do not. Behavior parameters
    stored per task are repeated for every step.
    """

    def __init__(self, episodes: EpisodeBatch, tasks: slice) -> None:
        self._rewards = episodes.rewards[tasks]
        self.mask: Array = episodes.mask[tasks] != 0
        self.observations: Array = episodes.observations[tasks, :, :-1][self.mask]
        self.actions: Array = episodes.actions[tasks][self.mask]
        self._cut = np.nonzero(episodes.truncated[tasks])
        ends = episodes.lengths[tasks][self._cut]
        self._last_steps = (*self._cut, ends - 1)
        self._last_observations = episodes.observations[tasks][(*self._cut, ends)]
        by_step, task_of_row = self.mask.shape[1:], np.nonzero(self.mask)[0]
        self.behavior: Params = {
            name: value[tasks][self.mask] if value.shape[1:3] == by_step else value[tasks][task_of_row]
            for name, value in episodes.behavior.items()
        }

    def rows(self, values: Array) -> Array:
        """Return the entries of values [b, E, T] at real steps, [N] float32."""
        return values[self.mask].astype(np.float32)

    def estimate(
        self, critic: Callable[[Array], Array], discount: float, gae_lambda: float, target: ValueTarget
    ) -> CriticEstimate:
        """Return values, advantages and targets estimated with a critic, a function from [n, O] to [n]."""
        values, next_values, rewards = np.zeros(self.mask.shape), np.zeros(self.mask.shape), self._rewards * self.mask
        values[self.mask] = critic(self.observations)
        next_values[..., :-1] = values[..., 1:]
        if len(self._last_observations):
            next_values[self._last_steps] = critic(self._last_observations)
        advantages = gae(rewards, values, next_values, discount, gae_lambda)
        if target == "td_lambda":
            return CriticEstimate(advantages, values, values + advantages)
        rewards = rewards.astype(np.float64)
        rewards[self._last_steps] += discount * next_values[self._last_steps]
        return CriticEstimate(advantages, values, discounted_returns(rewards, discount))
