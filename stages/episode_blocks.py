"""Sampling a task's episodes in blocks, until there are enough steps and episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.types import Array, EpisodeBatch


@dataclass(frozen=True)
class Enough:
    """When a task has been sampled enough.

    Attributes:
        min_steps: steps there must be, if any number.
        min_rollouts: episodes there must be, if any number.
        max_episodes: episodes there can be.
        max_episode_steps: steps there can be in an episode.
    """

    min_steps: int | None
    min_rollouts: int | None
    max_episodes: int
    max_episode_steps: int

    @property
    def block_size(self) -> int:
        """Episodes sampled side by side: as few as can be enough. Whole blocks are kept, so no step is wasted."""
        for_steps = -(-(self.min_steps or 1) // self.max_episode_steps)
        return min(self.max_episodes, max(for_steps, self.min_rollouts or 1))

    def reached(self, episodes: Sequence[EpisodeBatch]) -> bool:
        """Whether these blocks are enough."""
        num_episodes = sum(int(block.real.sum()) for block in episodes)
        num_steps = sum(block.num_steps for block in episodes)
        return num_episodes >= self.max_episodes or (
            num_steps >= (self.min_steps or 0) and num_episodes >= (self.min_rollouts or 1)
        )


def collect_until(enough: Enough, collect: Callable[[int], EpisodeBatch]) -> EpisodeBatch:
    """Blocks of one task's episodes, side by side, with empty places behind them.

    Args:
        enough: when to stop.
        collect: samples a block, given the place of its first episode.
    """
    blocks: list[EpisodeBatch] = []
    while not enough.reached(blocks):
        blocks.append(collect(len(blocks) * enough.block_size))
    return _side_by_side(blocks, enough.max_episodes)


def _side_by_side(blocks: Sequence[EpisodeBatch], num_places: int) -> EpisodeBatch:
    first = blocks[0]
    by_episode = first.rewards.shape[:2]

    def joined(parts: Sequence[Array]) -> Array:
        if parts[0].shape[:2] != by_episode:  # one for all episodes of the task
            return parts[0]
        together = np.concatenate(parts, axis=1)[:, :num_places]
        places = np.zeros((1, num_places, *together.shape[2:]), together.dtype)
        places[:, : together.shape[1]] = together
        return places

    def named(field: str) -> dict[str, Array]:
        return {name: joined([getattr(block, field)[name] for block in blocks]) for name in getattr(first, field)}

    plain = ("observations", "actions", "rewards", "terminated", "truncated", "lengths", "initial_state")
    return EpisodeBatch(
        **{name: joined([getattr(block, name) for block in blocks]) for name in plain},
        behavior=named("behavior"),
        reward_terms=named("reward_terms"),
    )
