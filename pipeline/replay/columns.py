"""Transitions as rows of one float32 matrix, so that any of them are gathered at once."""

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.types import Array, EpisodeBatch, Transitions


@dataclass(frozen=True)
class TransitionColumns:
    """The columns of such a matrix: observation, action, reward, next observation, terminated.

    Attributes:
        observation_size: O.
        action_size: A; 0 for discrete actions, whose number takes one column. Float32 holds it exactly below 2**24.
    """

    observation_size: int
    action_size: int

    @property
    def width(self) -> int:
        """Number of columns W."""
        return 2 * self.observation_size + max(self.action_size, 1) + 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(np.float32).itemsize

    def pack(self, episodes: EpisodeBatch, b: Array, e: Array, t: Array) -> Array:
        """Copy the steps t [n] of the episodes e [n] of the tasks b [n] into rows: [n, W] float32."""
        rows = np.empty((len(t), self.width), np.float32)
        O, end = self.observation_size, self.width - 1
        rows[:, :O] = episodes.observations[b, e, t]
        rows[:, O : end - O - 1] = episodes.actions[b, e, t].reshape(len(t), -1)
        rows[:, end - O - 1] = episodes.rewards[b, e, t]
        rows[:, end - O : end] = episodes.observations[b, e, t + 1]
        rows[:, end] = episodes.terminated[b, e] & (t == episodes.lengths[b, e] - 1)
        return rows

    def unpack(self, rows: Array) -> Transitions:
        """Return the transitions in rows [..., W], each field contiguous."""
        O, end = self.observation_size, self.width - 1
        actions = rows[..., O : end - O - 1]
        return Transitions(
            observations=np.ascontiguousarray(rows[..., :O]),
            actions=np.ascontiguousarray(actions) if self.action_size else actions[..., 0].astype(np.int64),
            rewards=np.ascontiguousarray(rows[..., end - O - 1]),
            next_observations=np.ascontiguousarray(rows[..., end - O : end]),
            terminated=rows[..., end] != 0,
        )
