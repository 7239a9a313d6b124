"""Division of a rollout batch's tasks into shards, at least two for each thread of the available workers.

An adaptive scheduler sees the whole rollout batch at once, and a worker that leaves takes little
with it. No bit of an episode depends on the division.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from metaloom.flows.rollouts.workers import SamplerSpec

SECONDS_PER_SHARD = 1.0
"""Target time limit of a shard with several tasks: the most that a rollout batch can lose while workers idle."""
LEAST_SECONDS_PER_SHARD = 0.1
FEWEST_SHARDS = 4
_ENOUGH_SHARDS = 8
_SHARDS_PER_THREAD = 2
_STEPS_PER_SECOND = 16_000


@dataclass(frozen=True)
class ShardCosts:
    """Seconds per task in the last rollout batch of every kind, as workers reported."""

    _by_kind: dict[str, float] = field(default_factory=dict[str, float])

    def tell(self, spec: SamplerSpec, seconds_per_task: float) -> None:
        """Store the mean seconds per task of a rollout batch."""
        self._by_kind[spec.model_dump_json()] = seconds_per_task

    def bounds(self, spec: SamplerSpec, num_tasks: int, threads: int = 0) -> Sequence[tuple[int, int]]:
        """Return the first and last + 1 task of every shard, in order, for workers with this number of threads."""
        seconds = self._by_kind.get(spec.model_dump_json()) or first_estimate(spec)
        size = tasks_per_shard(num_tasks, seconds, threads)
        return list(pairwise([*range(0, num_tasks, size), num_tasks]))


def first_estimate(spec: SamplerSpec) -> float:
    """Estimate the seconds per task before any measurement, from an assumed simulator speed."""
    return most_steps(spec) / _STEPS_PER_SECOND


def most_steps(spec: SamplerSpec) -> int:
    """Return the maximum environment steps of a task in a rollout batch, if the first block of episodes is enough."""
    return spec.episodes_at_once * spec.episodes_per_trial * spec.max_episode_steps


def tasks_per_shard(num_tasks: int, seconds_per_task: float, threads: int = 0) -> int:
    """Return the tasks of every shard but the last: a power of two, since workers keep simulators for few sizes.

    A shard takes an eighth of the rollout batch's work, at least LEAST_SECONDS_PER_SHARD, below which handing it
    out costs more than it gains, and at most SECONDS_PER_SHARD. If there are enough tasks, there are at least
    FEWEST_SHARDS, and two for each thread.
    """
    seconds = min(SECONDS_PER_SHARD, max(LEAST_SECONDS_PER_SHARD, num_tasks * seconds_per_task / _ENOUGH_SHARDS))
    most = min(seconds / seconds_per_task, num_tasks / max(FEWEST_SHARDS, _SHARDS_PER_THREAD * threads))
    return 1 << max(0, int(most).bit_length() - 1)
