"""Execution of rollouts in this process, or on Dask workers (`flows/rollouts/dask.py`).

An episode is bitwise identical wherever it is sampled, so the choice affects a run's duration but not its digests.
Workers import this module, so it must not import torch.
"""

import hashlib
import logging
import os
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from threadpoolctl import threadpool_limits

from metaloom import pipeline, stages
from metaloom.flows.rollouts.backend import Backend as Backend
from metaloom.flows.rollouts.backend import Traffic
from metaloom.pipeline.config.sources import acting_paths, own_paths
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.global_random import GlobalRandomWatch
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.schema import Settings
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import UNWATCHED, RolloutPosition, RolloutWatch, Sampler, play_episodes
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.sampler import Enough
from metaloom.stages.tools import Rollouts

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig


log: logging.Logger = logging.getLogger(__name__)


class SamplerSpec(Settings):
    """Settings from which a worker builds its sampler."""

    env: EnvConfig
    policy: PolicyConfig
    episodes_per_task: int | None
    """Number of episodes per task; None if `min_steps` determines it."""
    max_episode_steps: int
    threads: int
    actor: ActorKind = "policy"
    deterministic: bool = False
    min_steps: int | None = None
    min_rollouts: int | None = None
    episodes_per_trial: int = 1

    @classmethod
    def of(cls, config: "RunConfig", threads: int) -> "SamplerSpec":
        """Return the sampler settings for a run's configuration."""
        return cls(
            env=config.env,
            policy=config.policy,
            episodes_per_task=config.episodes_per_task,
            max_episode_steps=config.max_episode_steps,
            threads=threads,
            actor=config.algorithm.actor,
            min_steps=config.min_steps,
            min_rollouts=config.min_rollouts,
            episodes_per_trial=config.algorithm.trial or 1,
        )

    @property
    def enough(self) -> Enough | None:
        """Rule that determines when a task has enough episodes; None for a fixed number of episodes."""
        if self.min_steps is None and self.min_rollouts is None:
            return None
        return Enough(self.min_steps, self.min_rollouts, self.episodes_per_task, self.max_episode_steps)

    @property
    def episodes_at_once(self) -> int:
        """Number of episodes per task that are sampled in parallel."""
        if self.enough is not None:
            return self.enough.block_size
        assert self.episodes_per_task is not None, "nothing says when there are enough episodes"
        return self.episodes_per_task // self.episodes_per_trial


@dataclass(frozen=True)
class RolloutWorkers(Rollouts):
    """Collects rollout batches for all tasks, with samplers that are built from `spec`."""

    spec: SamplerSpec

    def traffic(self) -> Traffic | None:
        """Return traffic totals between this process and its workers, or None if there are no workers."""
        return None

    def sampling(
        self, episodes_per_task: int, *, deterministic: bool, actor: ActorKind | None = None, one_trial: bool = False
    ) -> Self:
        kind = {"actor": actor or self.spec.actor, "episodes_per_trial": episodes_per_task if one_trial else 1}
        return self._with(episodes_per_task=episodes_per_task, min_steps=None, deterministic=deterministic, **kind)

    def repeating(self) -> Self:
        """Return a collector for replaying one recorded episode on a new copy of the environment."""
        env = self.spec.env.model_copy(update={"copies": "fresh"})
        return self.sampling(1, deterministic=False, actor="recorded")._with(env=env)

    def filling(self, min_steps: int, *, actor: ActorKind) -> Self:
        return self._with(episodes_per_task=None, min_steps=min_steps, deterministic=False, actor=actor)

    def _with(self, **changes: Any) -> Self:
        return replace(self, spec=self.spec.model_copy(update={"min_rollouts": None, **changes}))


class LocalWorkers(RolloutWorkers):
    """Rollouts in this process."""

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        # Environments may print, but standard output is reserved for the command's result, such as JSON.
        with redirect_stdout(sys.stderr):
            return collect_shard(self.spec, params, tasks, position)


def collect_shard(
    spec: SamplerSpec, params: TaskParams, tasks: TaskBatch, position: RolloutPosition, watch: RolloutWatch = UNWATCHED
) -> EpisodeBatch:
    """Collect the episodes of some of the tasks with this thread's cached sampler."""
    with normal_numerics():
        sampler, random_watch = _warm.sampler(spec)
        episodes, draw = random_watch.draw_of(
            lambda: play_episodes(sampler, params, tasks, position=position, watch=watch), "rollouts"
        )
    if draw is not None and not (draw.in_env and draw.installed):
        raise StageFault(f"iteration {position.iteration}, inner step {position.step}: {draw}")
    if draw is not None:  # drawn by an installed package
        random_watch.stop()
        log.warning("env.name is %s: %s. Its episodes may differ when they are replayed", spec.env.name, draw)
    return episodes


@cache  # a process uses the code it has imported, even if the files change
def code_digest() -> str:
    """Return the SHA-256 of all source files that affect rollouts, for comparison between processes."""
    digest = hashlib.sha256()
    for package in (pipeline, stages):
        (folder,) = package.__path__
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def usable_cores() -> int:
    """Return the number of cores available to this process."""
    # Not every system supports CPU affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _WarmSamplers(threading.local):
    """A thread's cached samplers: one each for training and the witness, and two for evaluation episodes.

    Simulators are not shared between a worker's threads.
    """

    def __init__(self) -> None:
        self._by_spec: dict[str, tuple[Sampler, GlobalRandomWatch]] = {}

    def sampler(self, spec: SamplerSpec) -> tuple[Sampler, GlobalRandomWatch]:
        key = spec.model_dump_json()
        found = self._by_spec.pop(key, None)
        if found is None:
            # A replayed episode was already watched when it was first sampled.
            watched = spec.actor != "recorded" and bool(own_paths(acting_paths(spec.env, spec.policy)))
            # More than one BLAS thread would make results depend on the machine and occupy other workers' cores.
            threadpool_limits(1)
            sampler = Sampler(
                spec.env,
                spec.policy,
                episodes_per_task=spec.episodes_at_once * spec.episodes_per_trial,
                max_episode_steps=spec.max_episode_steps,
                num_threads=spec.threads,
                actor=spec.actor,
                deterministic=spec.deterministic,
                enough=spec.enough,
                episodes_per_trial=spec.episodes_per_trial,
            )
            found = sampler, GlobalRandomWatch(on=watched)
        self._by_spec[key] = found
        while len(self._by_spec) > 4:
            sampler, _ = self._by_spec.pop(next(iter(self._by_spec)))
            sampler.close()
        return found

    def close(self) -> None:
        while self._by_spec:
            sampler, _ = self._by_spec.popitem()[1]
            sampler.close()


_warm = _WarmSamplers()


def close_samplers() -> None:
    """Close this thread's cached samplers and their simulators."""
    _warm.close()
