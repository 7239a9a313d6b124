"""Sampling a task's episodes in blocks, until there are enough steps and episodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from metaloom.pipeline.types import Array, EpisodeBatch


@dataclass(frozen=True)
class Enough:
    """When a task has been sampled enough.

    Attributes:
        min_steps: steps there must be, if any number.
        min_rollouts: episodes there must be, if any number.
        max_episodes: episodes there can be; None for as many as it takes.
        max_episode_steps: steps there can be in an episode.
    """

    min_steps: int | None
    min_rollouts: int | None
    max_episodes: int | None
    max_episode_steps: int

    @property
    def block_size(self) -> int:
        """Episodes sampled side by side: as few as can be enough. Whole blocks are kept, so no step is wasted."""
        for_steps = -(-(self.min_steps or 1) // self.max_episode_steps)
        size = max(for_steps, self.min_rollouts or 1)
        return size if self.max_episodes is None else min(self.max_episodes, size)

    def reached(self, episodes: Sequence[EpisodeBatch]) -> bool:
        """Tell if these blocks are enough."""
        num_episodes = sum(int(block.real.sum()) for block in episodes)
        num_steps = sum(block.num_steps for block in episodes)
        if self.max_episodes is not None and num_episodes >= self.max_episodes:
            return True
        return num_steps >= (self.min_steps or 0) and num_episodes >= (self.min_rollouts or 1)


def collect_until(enough: Enough, collect: Callable[[int], EpisodeBatch]) -> EpisodeBatch:
    """Blocks of one task's episodes, side by side, with empty places behind them.

    Args:
        enough: when to stop.
        collect: samples a block, given the place of its first episode.
    """
    blocks: list[EpisodeBatch] = []
    while not enough.reached(blocks):
        blocks.append(collect(len(blocks) * enough.block_size))
    together = episodes_together(blocks)
    return together if enough.max_episodes is None else _with_places(together, enough.max_episodes)


def episodes_together(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
    """One batch of all episodes of the same tasks, in order."""
    return _change_episodes(batches, lambda parts: np.concatenate(parts, axis=1))


def tasks_together(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
    """One batch of all tasks, in order; those with fewer episodes than others have empty places behind them."""
    num_places = max(batch.rewards.shape[1] for batch in batches)
    return EpisodeBatch.concatenate([_with_places(batch, num_places) for batch in batches])


def _with_places(episodes: EpisodeBatch, num_places: int) -> EpisodeBatch:
    """The same with so many places per task: those behind it are cut off, or empty ones added."""

    def resized(parts: Sequence[Array]) -> Array:
        (values,) = parts
        kept = values[:, :num_places]
        places = np.zeros((len(values), num_places, *values.shape[2:]), values.dtype)
        places[:, : kept.shape[1]] = kept
        return places

    if episodes.rewards.shape[1] == num_places:
        return episodes
    return _change_episodes([episodes], resized)


def _change_episodes(batches: Sequence[EpisodeBatch], change: Callable[[Sequence[Array]], Array]) -> EpisodeBatch:
    """One batch from several of the same tasks: arrays [B, E, ...] by `change`, those [B, ...] from the first."""
    first = batches[0]

    def named(field: str) -> dict[str, Array]:
        found: list[Mapping[str, Array]] = [getattr(batch, field) for batch in batches]
        # One axis or two: the acting distribution of a task, whatever the number of its episodes.
        return {name: change([f[name] for f in found]) if v.ndim > 2 else v for name, v in found[0].items()}

    by_episode = [f.name for f in fields(first) if isinstance(getattr(first, f.name), np.ndarray)]
    return EpisodeBatch(
        **{name: change([getattr(batch, name) for batch in batches]) for name in by_episode},
        behavior=named("behavior"),
        reward_terms=named("reward_terms"),
        facts={name: change([batch.facts[name] for batch in batches]) for name in first.facts},
    )
