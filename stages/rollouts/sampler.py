"""Samplers, which reuse an environment's simulators between rollouts, and observers of a rollout's progress."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchEnv, Fact, MetaEnv
from metaloom.pipeline.envs.loop_batch import LoopBatch
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.envs.spaces import observation_dtype, spaces_of
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.acting import check_actor
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.stages.rollouts.faults import RolloutPosition


@dataclass(frozen=True)
class Enough:
    """Stopping rule for sampling a task: minimum numbers of steps and episodes and, optionally, a maximum."""

    min_steps: int | None
    min_rollouts: int | None
    max_episodes: int | None
    max_episode_steps: int

    @property
    def block_size(self) -> int:
        """Number of episodes collected in parallel: the smallest number that may suffice, at most `max_episodes`."""
        for_steps = -(-(self.min_steps or 1) // self.max_episode_steps)
        size = max(for_steps, self.min_rollouts or 1)
        return size if self.max_episodes is None else min(self.max_episodes, size)

    def reached(self, episodes: Sequence[EpisodeBatch]) -> bool:
        num_episodes = sum(int(block.real.sum()) for block in episodes)
        num_steps = sum(block.num_steps for block in episodes)
        if self.max_episodes is not None and num_episodes >= self.max_episodes:
            return True
        return num_steps >= (self.min_steps or 0) and num_episodes >= (self.min_rollouts or 1)


def collect_until(enough: Enough, collect: Callable[[int], EpisodeBatch]) -> EpisodeBatch:
    """Collect blocks of one task's episodes until there are enough, then pad or truncate to the maximum, if any."""
    blocks: list[EpisodeBatch] = []
    while not enough.reached(blocks):
        blocks.append(collect(len(blocks) * enough.block_size))
    together = episodes_together(blocks)
    return together if enough.max_episodes is None else _with_places(together, enough.max_episodes)


def episodes_together(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
    """Join batches of the same tasks by appending their episodes in order."""
    return _change_episodes(batches, lambda parts: np.concatenate(parts, axis=1))


def tasks_together(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
    """Join batches of different tasks in order. Tasks with fewer episodes are padded with empty slots."""
    num_places = max(batch.rewards.shape[1] for batch in batches)
    return EpisodeBatch.concatenate([_with_places(batch, num_places) for batch in batches])


def _with_places(episodes: EpisodeBatch, num_places: int) -> EpisodeBatch:
    """Return the episodes, truncated or padded to `num_places` slots per task."""

    def resized(parts: Sequence[Array]) -> Array:
        kept = parts[0][:, :num_places]
        return np.pad(kept, ((0, 0), (0, num_places - kept.shape[1]), *((0, 0),) * (kept.ndim - 2)))

    if episodes.rewards.shape[1] == num_places:
        return episodes
    return _change_episodes([episodes], resized)


def _change_episodes(batches: Sequence[EpisodeBatch], change: Callable[[Sequence[Array]], Array]) -> EpisodeBatch:
    """Join batches of the same tasks: `change` joins arrays [B, E, ...]; arrays [B, ...] come from the first batch."""
    first = batches[0]

    def named(field: str) -> dict[str, Array]:
        found: list[Mapping[str, Array]] = [getattr(batch, field) for batch in batches]
        # Arrays with one or two axes describe a task's acting distribution, whatever the number of episodes.
        return {name: change([f[name] for f in found]) if v.ndim > 2 else v for name, v in found[0].items()}

    by_episode = [f.name for f in fields(first) if isinstance(getattr(first, f.name), np.ndarray)]
    return EpisodeBatch(
        **{name: change([getattr(batch, name) for batch in batches]) for name in by_episode},
        behavior=named("behavior"),
        reward_terms=named("reward_terms"),
        facts={name: change([batch.facts[name] for batch in batches]) for name in first.facts},
    )


class RolloutWatch:
    """Observer of a rollout's progress. This base class does nothing."""

    def actions(self, shape: tuple[int, int, int], position: RolloutPosition) -> Array:
        """Return a zeroed buffer, [T, N, A] float32, for actions, which are copied when their episodes have ended."""
        return np.zeros(shape, np.float32)

    def idle(self) -> None:
        """Record that no environment is being called."""

    def entered(self, env_step: int | None) -> None:
        """Record that the environments are about to be reset (None) or stepped."""

    def left(self) -> None:
        """Record that the environments have returned."""

    def row(self, row: int) -> None:
        """Record which row is about to be called, for environments called in a loop."""


UNWATCHED = RolloutWatch()


@dataclass(eq=False)
class Sampler:
    """Simulators for a run's rollouts, created on first use and reused. Not thread-safe.

    The E episodes of a task form trials of `episodes_per_trial` episodes, which are collected in sequence with shared
    actor memory. Trials are collected in parallel. For actors without memory, `episodes_per_trial` is 1.
    """

    _KEPT: ClassVar[int] = 4

    env: EnvConfig
    policy: PolicyConfig
    _: KW_ONLY
    episodes_per_task: int  # E, unless `enough` determines it
    max_episode_steps: int  # T
    num_threads: int = 1
    actor: ActorKind = "policy"
    deterministic: bool = False  # True takes the most likely actions instead of sampling
    enough: Enough | None = None
    episodes_per_trial: int = 1
    _batches: dict[int, BatchEnv] = field(init=False, repr=False, default_factory=dict[int, BatchEnv])

    @property
    def episodes_at_once(self) -> int:
        """Number of episodes per task collected in parallel."""
        if self.enough is not None:
            return self.enough.block_size
        return self.episodes_per_task // self.episodes_per_trial

    @cached_property
    def spaces(self) -> Spaces:
        """Observation and action spaces of the environment. Raises ValueError if the actor does not support them."""
        check_actor(self.actor, self._example.action_space, deterministic=self.deterministic)
        return spaces_of(self._example)

    @cached_property
    def observation_dtype(self) -> np.dtype[Any]:
        """Dtype in which observations are stored."""
        return observation_dtype(self._example.observation_space, self.env)

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Facts that the environment declares in addition to observations and rewards."""
        return declared_facts(self._example)

    @cached_property
    def _example(self) -> MetaEnv:
        env = make_env(self.env)
        env.close()
        return env

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> BatchEnv:
        """Return the simulators for shards of `num_tasks` tasks. The four most recently used sizes are cached.

        Environments that require fresh copies get new simulators every time.
        """
        if self.env.copies == "fresh":
            self.close()
        batch = self._batches.pop(num_tasks, None)
        if batch is None:
            batch = make_batch_env(self.env, num_tasks * self.episodes_at_once, self.num_threads, watch.row)
        if isinstance(batch, LoopBatch):
            batch.watch_row = watch.row
        self._batches[num_tasks] = batch
        while len(self._batches) > self._KEPT:
            self._batches.pop(next(iter(self._batches))).close()
        return batch

    def close(self) -> None:
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()
