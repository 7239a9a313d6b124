"""Trials as sequences: consecutive episodes of a task that share a memory."""

from functools import cached_property

import numpy as np

from metaloom.pipeline.estimation.returns import gae
from metaloom.pipeline.types import Array, EpisodeBatch


class Trials:
    """An iteration's N = B·M trials of n episodes each, as sequences of real steps, padded at the end to length L.

    Of a task's E = n·M episodes, the first M are the first episodes of its M trials, and the next M are their second
    episodes. Trial m of task b is sequence b·M + m.
    """

    def __init__(self, episodes: EpisodeBatch, episodes_per_trial: int, num_actions: int) -> None:
        """Arrange episodes as trials; `num_actions` is 0 for continuous actions."""
        self._shape, self._n = episodes.rewards.shape, episodes_per_trial
        mask = self._joined(episodes.mask != 0)
        self._order: Array | None = None
        if not mask.all():
            # Real steps first, in order.
            self._order = np.argsort(~mask, axis=1, kind="stable")[:, : int(mask.sum(1).max())]
        self.mask: Array = self.along(episodes.mask != 0)  # True for real steps, [N, L] bool
        self.actions: Array = self.along(episodes.actions)  # [N, L, A] float32 or [N, L] int64
        self.rewards: Array = self.along(episodes.rewards) * self.mask  # [N, L]
        observations = self.along(episodes.observations[:, :, :-1])
        self._episodes = episodes
        # Actions as float32, one-hot if discrete, [N, L, A].
        self.taken: Array = np.eye(num_actions, dtype=np.float32)[self.actions] if num_actions else self.actions
        ends = self.along((np.arange(self._shape[2]) + 1 == episodes.lengths[..., None]).astype(np.float32))
        seen = np.concatenate([self.taken, self.rewards[..., None], ends[..., None]], axis=-1)
        before = np.zeros_like(seen)
        before[:, 1:] = seen[:, :-1]
        # A policy's inputs: the observation, and the previous action, reward and end of episode, [N, L, O + A + 2].
        self.inputs: Array = np.concatenate([observations, before], axis=-1, dtype=np.float32)
        num_trials, length = self.mask.shape
        of_tasks = np.arange(num_trials) // (num_trials // self._shape[0])
        self.behavior: dict[str, Array] = {  # keyed by name, [N, L, ...] each
            name: self.along(value)
            if value.shape[1:3] == self._shape[1:] and value.ndim > 3
            else np.repeat(value[of_tasks][:, None], length, axis=1)
            for name, value in episodes.behavior.items()
        }

    def __len__(self) -> int:
        return len(self.mask)

    @cached_property
    def next_observations(self) -> Array:
        """Next observations, [N, L, O]; at an episode's last step, its final observation."""
        return self.along(self._episodes.observations[:, :, 1:]).astype(np.float32, copy=False)

    @property
    def num_bytes(self) -> int:
        """Size of the trials and their episodes in memory, in bytes."""
        values = [*vars(self).values(), *vars(self._episodes).values(), *self.behavior.values()]
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    def along(self, values: Array) -> Array:
        """Arrange values [B, E, T, ...] as trials, [N, L, ...], without setting padding to zero."""
        joined = self._joined(values)
        if self._order is None:
            return joined
        order = self._order.reshape(*self._order.shape, *(1,) * (joined.ndim - 2))
        return np.take_along_axis(joined, order, axis=1)

    def by_episode(self, values: Array) -> Array:
        """Arrange values [N, L] of trials by episode, [B, E, T], zero in the padding."""
        (B, E, T), n = self._shape, self._n
        joined = np.zeros((len(values), n * T), values.dtype)
        order = np.broadcast_to(np.arange(self.mask.shape[1]), self.mask.shape) if self._order is None else self._order
        np.put_along_axis(joined, order, np.where(self.mask, values, 0), axis=1)
        return np.ascontiguousarray(joined.reshape(B, E // n, n, T).swapaxes(1, 2)).reshape(B, E, T)

    @property
    def lengths(self) -> Array:
        """Number of real steps in each trial, [N]."""
        return self.mask.sum(1)

    @property
    def cut(self) -> Array:
        """Mask [N] bool, True if the step limit ended the trial's last episode."""
        B, E, _ = self._shape
        return self._episodes.truncated.reshape(B, self._n, E // self._n)[:, -1].reshape(-1)

    @property
    def inputs_to_end(self) -> Array:
        """`inputs` extended by the input after each last step, as if the episode continued, [N, L+1, O + A + 2]."""
        trials, last = np.arange(len(self)), self.lengths - 1
        inputs = np.concatenate([self.inputs, np.zeros_like(self.inputs[:, :1])], axis=1)
        end = np.zeros_like(self.rewards[trials, last, None])
        seen = [self.next_observations, self.taken, self.rewards[..., None]]
        inputs[trials, last + 1] = np.concatenate([*(part[trials, last] for part in seen), end], axis=-1)
        return inputs

    def position(self, max_episode_steps: int, discount: float) -> Array:
        """Return the position in the trial at each step, [N, L, n+2] float32.

        The position consists of the one-hot index of the episode among n, the fraction of its T steps taken so far, and
        the discounted number of remaining steps, Σ γ^k, as a fraction of its value for a whole trial of n·T steps.
        """
        _, E, T = self._shape
        step = self.along(np.broadcast_to(np.arange(T), self._shape))
        episode = self.along(np.broadcast_to((np.arange(E) // (E // self._n))[:, None], self._shape))
        left = (self._n - episode) * max_episode_steps - step
        whole = self._n * max_episode_steps
        share = left / whole if discount == 1 else (1 - discount**left) / (1 - discount**whole)
        place = np.eye(self._n)[episode]
        return np.concatenate([place, (step / max_episode_steps)[..., None], share[..., None]], -1, dtype=np.float32)

    def advantages(self, values: Array, discount: float, gae_lambda: float, behind: Array | None = None) -> Array:
        """Return advantages [N, L] float64 from values [N, L], zero in the padding.

        They extend across episodes and stop at the end of the trial, because the objective is the discounted return of
        the trial (Duan et al. 2016, section 2.2). `behind` [N] is the value to bootstrap from after each trial.
        """
        values = np.where(self.mask, values, 0)
        next_values = np.zeros_like(values)
        next_values[:, :-1] = values[:, 1:]
        if behind is not None:
            next_values[np.arange(len(self)), self.lengths - 1] = behind
        return gae(self.rewards, values, next_values, discount, gae_lambda)

    def _joined(self, values: Array) -> Array:
        """Reshape values [B, E, T, ...] to [N, n·T, ...], with a trial's episodes in sequence."""
        (B, E, T), n = self._shape, self._n
        split = values.reshape(B, n, E // n, T, *values.shape[3:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(B * (E // n), n * T, *values.shape[3:])
