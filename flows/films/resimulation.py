"""A stored episode, simulated again step by step and held to what is stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch
from metaloom.stages.rollouts.faults import RolloutPosition


@dataclass(frozen=True)
class Recording:
    """A stored episode, and all that it takes to simulate it again.

    Attributes:
        config: settings under which it was sampled.
        position: at which its batch was sampled.
        b, e: places of its task and of the episode in the batch.
        tasks: of the iteration.
        episodes: the batch.
    """

    config: RunConfig
    position: RolloutPosition
    b: int
    e: int
    tasks: TaskBatch
    episodes: EpisodeBatch

    @property
    def length(self) -> int:
        """Steps in the episode."""
        return int(self.episodes.lengths[self.b, self.e])

    @property
    def rewards(self) -> Array:
        """[T], of its real steps."""
        return self.episodes.rewards[self.b, self.e, : self.length]

    def simulate(self, env: MetaEnv) -> Iterator[float]:
        """Reset the environment and take the episode's steps.

        Yields:
            After the reset, and after every step: the largest difference of an observation from the stored one.
        """
        env.set_task(self.tasks.params[self.b])
        stored = self.episodes.observations[self.b, self.e]
        observation, _ = env.reset(seed=self.position.reset_seed(self.b, self.e, self.config.env.seed_bits))
        yield _difference(observation, stored[0])
        for t, action in enumerate(self.episodes.actions[self.b, self.e, : self.length]):
            yield _difference(env.step(action)[0], stored[t + 1])


def _difference(observation: Any, stored: Array) -> float:
    # As the sampler keeps them.
    found = np.asarray(observation, np.float64).ravel().astype(stored.dtype)
    if found.shape != stored.shape:
        return float("inf")
    return float(np.max(np.abs(found.astype(np.float64) - stored), initial=0.0))
