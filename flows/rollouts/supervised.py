"""Supervised rollouts in worker processes, which may die. Workers import this module, so it must not import torch."""

import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import version

import dask.sizeof
import distributed.utils_comm
import numpy as np
from dask.sizeof import sizeof

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.flight_recorder import (
    NOT_YET,
    FlightRecorder,
    Recording,
    read_recordings,
    recorded,
    recordings_folder,
)
from metaloom.flows.rollouts.workers import SamplerSpec, code_digest, collect_shard
from metaloom.flows.streams import print_to_errors
from metaloom.pipeline.arithmetic import acting_facts
from metaloom.pipeline.config.sources import acting_paths, loaded_sources, sources_of
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, Samples, Step, TaskBatch, TaskParams, Update
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.faults import Circumstances, RolloutError


def fingerprint(spec: SamplerSpec) -> dict[str, str]:
    """Return the versions of everything that affects a rollout, including plug-in sources."""
    return {**_versions(), **_torch_version(), **_named(sources_of(acting_paths(spec.env, spec.policy)))}


def check_worker(spec: SamplerSpec) -> tuple[dict[str, str], tuple[str, ...]]:
    """Build the environment once on the worker, and return the worker's versions and CPU code paths."""
    make_env(spec.env).close()
    return _fingerprint_here(spec), acting_facts()


def require_own_versions(required: Mapping[str, str], spec: SamplerSpec) -> None:
    """Raise WorkersError if this worker's versions differ from the trainer's, for example after a restart."""
    require_versions(required, _fingerprint_here(spec), f"on {socket.gethostname()}")


def require_versions(required: Mapping[str, str], found: Mapping[str, str], worker: str) -> None:
    """Raise WorkersError if a worker's versions differ from the trainer's; torch and plug-in sources may be missing."""
    differing = [
        f"{name} {found.get(name)} there, {here} here"
        for name, here in required.items()
        if found.get(name, None if name in _versions() else here) != here
    ]
    if differing:
        raise WorkersError(
            f"the Dask worker {worker} has different versions: {'; '.join(differing)}. They must match the "
            "trainer's; otherwise, digests would differ. Restart the worker if it has been updated"
        )


@cache
def _versions() -> dict[str, str]:
    packages = ("numpy", "mujoco", "gymnasium")
    return {"metaloom's code": code_digest()[:12]} | {name: version(name) for name in packages}


def _torch_version() -> dict[str, str]:
    # Only for a process that uses torch; the built-in MLP does not need it.
    return {"torch": version("torch")} if "torch" in sys.modules else {}


def _fingerprint_here(spec: SamplerSpec) -> dict[str, str]:
    paths = acting_paths(spec.env, spec.policy)
    sources = {name: digest for path in paths for name, digest in _first_seen(path).items()}
    return {**_versions(), **_torch_version(), **_named(sources)}


@cache
def _first_seen(path: str) -> dict[str, str]:
    """Return the source digests of a plug-in at its first use; this process keeps using that code."""
    return loaded_sources([path])


def _named(sources: Mapping[str, str]) -> dict[str, str]:
    return {f"the source of {name}": digest[:12] for name, digest in sources.items()}


def num_bytes(value: object) -> int:
    """Return the total size in bytes of a batch's arrays, or the length of a string."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, tuple):
        return sum(map(num_bytes, value))
    if is_dataclass(value):
        return sum(num_bytes(getattr(value, each.name)) for each in fields(value))
    return 0


for _kind in (TaskBatch, TaskParams, EpisodeBatch, Samples, Step, Update):
    sizeof.register(_kind, num_bytes)

# Dask's threads draw from `random`. Give them a separate generator, so that the global one changes only if the work
# itself draws.
for _dask in (dask.sizeof, distributed.utils_comm):
    vars(_dask)["random"] = random.Random()


@dataclass(frozen=True)
class Supervision:
    """Settings for supervising a piece of work."""

    session: str  # identifies the folder of recordings
    key: str  # identifies the work within the session
    step_timeout_seconds: float  # timeout for a single environment call
    versions: Mapping[str, str] = field(default_factory=dict[str, str])  # required versions

    def recordings(self) -> list[Recording]:
        """Return the recordings of earlier attempts on this machine."""
        return read_recordings(recordings_folder(self.session), self.key)

    def recorded(self, episodes_per_task: int = 1) -> AbstractContextManager[FlightRecorder]:
        """Return a context manager that records another attempt."""
        return recorded(recordings_folder(self.session), self.key, self.step_timeout_seconds, episodes_per_task)


@dataclass(frozen=True)
class Shard:
    """One worker's share of a rollout batch."""

    spec: SamplerSpec
    tasks: TaskBatch
    position: RolloutPosition

    @property
    def name(self) -> str:
        """Name shown on Dask's dashboard, such as `collect_rollouts-i12-k1-tasks8:12`."""
        at = self.position
        return f"collect_rollouts-i{at.iteration}-k{at.step}-tasks{at.first_task}:{at.first_task + len(self.tasks)}"

    def part(self, first: int, stop: int) -> "Shard":
        """Return a shard with the tasks from index `first` up to, but not including, `stop`."""
        position = replace(self.position, first_task=self.position.first_task + first)
        return replace(self, tasks=self.tasks.slice(first, stop), position=position)

    def death(
        self, recordings: Sequence[Recording], supervision: Supervision, ending: str | None = None
    ) -> RolloutError:
        """Return the error for processes that died in this shard; `ending` says how the last one ended, if known."""
        last = recordings[-1]
        at = self._circumstances(last)
        nothing = np.zeros((0, len(at.tasks) * at.episodes_per_task, 0), np.float32)
        return at.fault(
            _cause_of_death(recordings, supervision.step_timeout_seconds, ending),
            "make" if last.at.env_step == NOT_YET else "reset" if last.at.env_step < 0 else "step",
            last.traceback,
            None if last.at.row < 0 else last.at.row,
            env_step=None if last.at.env_step < 0 else last.at.env_step,
            actions=last.actions if last.actions.size else nothing,
        )

    def _circumstances(self, recording: Recording) -> Circumstances:
        """Return the context in which a fault is described: the whole shard, or one task's block of episodes."""
        spec = self.spec
        at, tasks = self.position, self.tasks
        if recording.at.env_step != NOT_YET:
            at = replace(at, first_episode=recording.at.first_episode)
            if spec.enough is not None:
                b = recording.at.first_task - at.first_task
                at, tasks = replace(at, first_task=recording.at.first_task), tasks.slice(b, b + 1)
        return Circumstances(spec.env, tasks, at, spec.episodes_at_once)


@dataclass(frozen=True)
class CollectedShard:
    """A shard's episodes, and the wall-clock and processor time in seconds that collecting them took."""

    episodes: EpisodeBatch
    seconds: float
    processor_seconds: float

    @property
    def cost(self) -> float:
        """Estimated collection time on an otherwise idle machine, in seconds."""
        # A simulator in another process or on another machine uses little of this thread's time.
        return self.processor_seconds if self.processor_seconds > self.seconds / 10 else self.seconds


sizeof.register(CollectedShard, num_bytes)


def collect_watched(shard: Shard, params: TaskParams, supervision: Supervision) -> CollectedShard:
    """Collect a shard's episodes on a worker, unless an earlier attempt shows that this would end the process."""
    if multiprocessing.parent_process() is not None:  # environments may print, and the trainer's output is inherited
        print_to_errors()
    require_own_versions(supervision.versions, shard.spec)
    earlier = supervision.recordings()
    # After a timeout or with closed file descriptors, another attempt would end in the same way.
    if final := [recording for recording in earlier if recording.timed_out or recording.closed]:
        raise shard.death(final, supervision)
    try:
        with supervision.recorded(shard.spec.episodes_at_once) as recorder:
            began, worked = time.perf_counter(), time.thread_time()
            episodes = collect_shard(shard.spec, params, shard.tasks, shard.position, recorder)
            collected = CollectedShard(episodes, time.perf_counter() - began, time.thread_time() - worked)
        # Check again, since the first shard with a torch policy has just imported torch.
        require_own_versions(supervision.versions, shard.spec)
        return collected
    except StageFault as error:
        fault = error
    # Do not send the environment's exception, which may not be picklable.
    fault.__cause__ = fault.__context__ = None
    raise fault.with_traceback(None)


def try_environment(spec: SamplerSpec, supervision: Supervision) -> EnvError | None:
    """Build an environment and draw a task on a worker, since the trainer would not survive a hang or crash.

    An EnvError is returned, since Dask would log the traceback of a raised one.
    """
    if any(recording.timed_out for recording in supervision.recordings()):
        raise TimeoutError(supervision.recordings()[-1].traceback)
    with supervision.recorded():
        try:
            env = make_env(spec.env)
            draw_tasks(env, num_tasks=1, run_seed=0, iteration=0)
        except EnvError as error:
            return error
        env.close()
    return None


def _cause_of_death(recordings: Sequence[Recording], timeout_seconds: float, ending: str | None) -> str:
    times = "" if len(recordings) == 1 else f" {len(recordings)} times at the same point"
    if recordings[-1].stopped:
        return (
            "its process was stopped (SIGSTOP, by itself or from outside) and did not continue within "
            f"{timeout_seconds:g} s, so it was ended. It must answer in time"
        )
    if recordings[-1].timed_out:
        return (
            f"did not return within {timeout_seconds:g} s, so its process was ended. It must answer in time. "
            "If it needs more time, pass --step-timeout SECONDS"
        )
    if recordings[-1].traceback:
        return f"its process died{times}: {recordings[-1].traceback.splitlines()[0]}"
    how = ending or "as by os._exit, or by kill -9 from outside or for lack of memory"
    return f"its process died{times} without a message, {how}; an environment must keep its process alive"
