"""Execution of rollouts in this process, or on Dask workers (`flows/rollouts/dask.py`).

An episode's bits depend on its position in the run and on nothing here, so the choice changes the time a run takes and
never its digests. Workers import this module, so it stays free of torch.
"""

import hashlib
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from threadpoolctl import threadpool_limits

from metaloom import pipeline, stages
from metaloom.flows.rollouts.backend import Backend as Backend
from metaloom.flows.rollouts.backend import Traffic
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.global_random import GlobalRandomWatch
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.plugin_files import acting_paths, own_paths
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.schema import Settings
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import UNWATCHED, RolloutPosition, RolloutWatch, Sampler, play_episodes
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.sampler import Enough

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig


T = TypeVar("T")

log: logging.Logger = logging.getLogger(__name__)


class SamplerSpec(Settings):
    """Data from which a worker builds its sampler."""

    env: EnvConfig
    policy: PolicyConfig
    episodes_per_task: int | None
    """None for the number that min_steps takes."""
    max_episode_steps: int
    threads: int
    actor: ActorKind = "policy"
    deterministic: bool = False
    min_steps: int | None = None
    min_rollouts: int | None = None
    episodes_per_trial: int = 1

    @classmethod
    def of(cls, config: "RunConfig", threads: int) -> "SamplerSpec":
        """Return the part of a run's configuration that rollouts depend on."""
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

    def sampling(
        self, episodes_per_task: int, *, deterministic: bool, actor: ActorKind | None = None, one_trial: bool = False
    ) -> "SamplerSpec":
        """Return a spec for another kind of episodes and a fixed number of them."""
        kind: dict[str, Any] = {"deterministic": deterministic, "actor": actor or self.actor}
        kind |= {"episodes_per_trial": episodes_per_task if one_trial else 1}
        number = {"episodes_per_task": episodes_per_task, "min_steps": None, "min_rollouts": None}
        return self.model_copy(update=kind | number)

    def filling(self, min_steps: int, *, actor: ActorKind) -> "SamplerSpec":
        """Return a spec that samples at least `min_steps` steps of every task, with another actor."""
        kind = {"deterministic": False, "actor": actor}
        number = {"episodes_per_task": None, "min_steps": min_steps, "min_rollouts": None}
        return self.model_copy(update=kind | number)

    def repeating(self) -> "SamplerSpec":
        """Return a spec for one recorded episode on a new copy."""
        env = self.env.model_copy(update={"copies": "fresh"})
        return self.sampling(1, deterministic=False, actor="recorded").model_copy(update={"env": env})

    @property
    def enough(self) -> Enough | None:
        """When a task has been sampled enough; None for always as many episodes."""
        if self.min_steps is None and self.min_rollouts is None:
            return None
        return Enough(self.min_steps, self.min_rollouts, self.episodes_per_task, self.max_episode_steps)

    @property
    def episodes_at_once(self) -> int:
        """Episodes of a task that are sampled side by side."""
        if self.enough is not None:
            return self.enough.block_size
        assert self.episodes_per_task is not None, "nothing says when there are enough episodes"
        return self.episodes_per_task // self.episodes_per_trial


@dataclass(frozen=True)
class RolloutWorkers(ABC):
    """Collector of rollout batches for all tasks.

    Attributes:
        spec: Specification of the samplers.
    """

    spec: SamplerSpec

    @abstractmethod
    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task."""

    def uninterrupted(self, work: Callable[[], T], where: str) -> T:
        """Do work with the workers and return its result; `where` names its location in the run for messages."""
        return work()

    def traffic(self) -> Traffic | None:
        """Return the totals of the traffic between this process and its workers; None without workers."""
        return None

    def sampling(
        self, episodes_per_task: int, *, deterministic: bool, actor: ActorKind | None = None, one_trial: bool = False
    ) -> Self:
        """Return the workers for another number of episodes, with the most likely actions if `deterministic`.

        `actor` replaces the algorithm's. With `one_trial` the episodes run in sequence, each with the actor's memory of
        the ones before.
        """
        spec = self.spec.sampling(episodes_per_task, deterministic=deterministic, actor=actor, one_trial=one_trial)
        return replace(self, spec=spec)

    def repeating(self) -> Self:
        """Return the workers for one recorded episode on a new copy of the environment."""
        return replace(self, spec=self.spec.repeating())

    def filling(self, min_steps: int, *, actor: ActorKind) -> Self:
        """Return the workers for at least `min_steps` steps of each task, with another actor."""
        return replace(self, spec=self.spec.filling(min_steps, actor=actor))


class LocalWorkers(RolloutWorkers):
    """Rollouts in this process."""

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task."""
        # Standard output carries what the command prints, such as JSON; an environment may print too.
        with redirect_stdout(sys.stderr):
            return collect_shard(self.spec, params, tasks, position)


def collect_shard(
    spec: SamplerSpec, params: TaskParams, tasks: TaskBatch, position: RolloutPosition, watch: RolloutWatch = UNWATCHED
) -> EpisodeBatch:
    """Collect episodes of some of the tasks, with the sampler that this thread keeps warm."""
    with normal_numerics():
        sampler, random_watch = _warm.sampler(spec)
        episodes, draw = random_watch.draw_of(
            lambda: play_episodes(sampler, params, tasks, position=position, watch=watch), "rollouts"
        )
    if draw is not None and not (draw.in_env and draw.installed):
        place = f"iteration {position.iteration}, inner step {position.step}"
        raise StageFault(f"{place}: {draw}")
    if draw is not None:  # of a package that its user cannot change
        random_watch.stop()
        log.warning("env.name is %s: %s. Its episodes may differ when they are played again", spec.env.name, draw)
    return episodes


@cache  # a process computes with what it has imported, whatever lies there later
def code_digest() -> str:
    """Return the SHA-256 of the source files that affect rollouts, to compare processes."""
    digest = hashlib.sha256()
    for package in (pipeline, stages):
        (folder,) = package.__path__
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    # Not every system can restrict a process to some of them.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _WarmSamplers(threading.local):
    """The samplers of a thread's last four specs: of training, the witness, and an evaluation's two kinds of episodes.

    A worker may have several threads, and simulators are not shared.
    """

    def __init__(self) -> None:
        self._by_spec: dict[str, tuple[Sampler, GlobalRandomWatch]] = {}

    def sampler(self, spec: SamplerSpec) -> tuple[Sampler, GlobalRandomWatch]:
        key = spec.model_dump_json()
        found = self._by_spec.pop(key, None)
        if found is None:
            # What is played again has been watched when it was played first.
            watched = spec.actor != "recorded" and bool(own_paths(acting_paths(spec.env, spec.policy)))
            found = _build(spec), GlobalRandomWatch(on=watched)
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
    """Free the simulators that this thread keeps warm."""
    _warm.close()


def _build(spec: SamplerSpec) -> Sampler:
    # More than one BLAS thread would make bits depend on the machine and take the neighbours' cores.
    threadpool_limits(1)
    return Sampler(
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
