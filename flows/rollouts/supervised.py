"""Rollouts in a worker process that may not live to return them. Workers import this module: no torch."""

import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import dask.sizeof
import distributed.utils_comm
import numpy as np

from metaloom.flows.rollouts.flight_recorder import (
    NOT_YET,
    FlightRecorder,
    Recording,
    read_recordings,
    recorded,
    recordings_folder,
)
from metaloom.flows.rollouts.sizes import num_bytes
from metaloom.flows.rollouts.versions import require_own_versions
from metaloom.flows.rollouts.workers import SamplerSpec, collect_shard
from metaloom.flows.streams import print_to_errors
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.faults import Circumstances, RolloutError
from metaloom.stages.sample_tasks import draw_tasks

# Dask's threads draw from `random` in the trainer and in workers. They get a separate generator, so that the global one
# changes only if the work draws.
for _dask in (dask.sizeof, distributed.utils_comm):
    vars(_dask)["random"] = random.Random()


@dataclass(frozen=True)
class Supervision:
    """Supervision of a piece of work.

    Attributes:
        session: Names the trainer's recordings.
        key: Names the piece of work among them.
        step_timeout_seconds: Time limit for one call of an environment.
        versions: Versions that affect results and must be equal on the worker; none if it was started from here.
    """

    session: str
    key: str
    step_timeout_seconds: float
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    def recordings(self) -> list[Recording]:
        """Return the recordings of earlier attempts on this machine."""
        return read_recordings(recordings_folder(self.session), self.key)

    def recorded(self, episodes_per_task: int = 1) -> AbstractContextManager[FlightRecorder]:
        """Start a recorder for one more attempt."""
        return recorded(recordings_folder(self.session), self.key, self.step_timeout_seconds, episodes_per_task)


@dataclass(frozen=True)
class Shard:
    """A worker's share of a rollout batch."""

    spec: SamplerSpec
    tasks: TaskBatch
    position: RolloutPosition

    @property
    def name(self) -> str:
        """Place in the run, as Dask's pages show it: `collect_rollouts-i12-k1-tasks8:12`."""
        at = self.position
        return f"collect_rollouts-i{at.iteration}-k{at.step}-tasks{at.first_task}:{at.first_task + len(self.tasks)}"

    def death(
        self, recordings: Sequence[Recording], supervision: Supervision, ending: str | None = None
    ) -> RolloutError:
        """Build the error for processes that ended in this shard. The last one's ending may be known."""
        last = recordings[-1]
        at = self._circumstances(last)
        row = None if last.row < 0 else last.row
        nothing = np.zeros((0, len(at.tasks) * at.episodes_per_task, 0), np.float32)
        return at.fault(
            _cause_of_death(recordings, supervision.step_timeout_seconds, ending),
            "make" if last.env_step == NOT_YET else "reset" if last.env_step < 0 else "step",
            last.traceback,
            row,
            env_step=None if last.env_step < 0 else last.env_step,
            actions=last.actions if last.actions.size else nothing,
        )

    def _circumstances(self, recording: Recording) -> Circumstances:
        """Describe the episodes that were sampled side by side: all of the shard's, or a block of one task's."""
        spec = self.spec
        if recording.env_step == NOT_YET:
            return Circumstances(spec.env, self.tasks, self.position, spec.episodes_at_once)
        if spec.enough is None:
            at = replace(self.position, first_episode=recording.first_episode)
            return Circumstances(spec.env, self.tasks, at, spec.episodes_at_once)
        at = replace(self.position, first_task=recording.first_task, first_episode=recording.first_episode)
        b = recording.first_task - self.position.first_task
        return Circumstances(spec.env, self.tasks.slice(b, b + 1), at, spec.episodes_at_once)


@dataclass(frozen=True)
class Collected:
    """A shard's episodes.

    Attributes:
        episodes: Episodes of its tasks.
        seconds: Wall time.
        processor_seconds: Part of `seconds` during which a processor worked for them.
    """

    episodes: EpisodeBatch
    seconds: float
    processor_seconds: float

    @property
    def cost(self) -> float:
        """Seconds that they would take on a machine that nobody else uses."""
        # A simulator that is another process, or on another machine, takes hardly any of this thread's.
        return self.processor_seconds if self.processor_seconds > self.seconds / 10 else self.seconds


dask.sizeof.sizeof.register(Collected, num_bytes)


def collect_watched(shard: Shard, params: TaskParams, supervision: Supervision) -> Collected:
    """Collect episodes of a shard, unless it would end the process as an earlier attempt did. Runs on a worker.

    Raises:
        RolloutError: An error of `collect_rollouts`; or an earlier attempt ended itself, and this one would too.
        WorkersError: This worker has other versions than the trainer.
    """
    if multiprocessing.parent_process() is not None:  # what environments print: the trainer's output is inherited
        print_to_errors()
    require_own_versions(supervision.versions, shard.spec)
    earlier = supervision.recordings()
    if final := [recording for recording in earlier if recording.would_repeat]:
        raise shard.death(final, supervision)
    try:
        with supervision.recorded(shard.spec.episodes_at_once) as recorder:
            began, worked = time.perf_counter(), time.thread_time()
            episodes = collect_shard(shard.spec, params, shard.tasks, shard.position, recorder)
            collected = Collected(episodes, time.perf_counter() - began, time.thread_time() - worked)
        # Again: the first shard of a policy that acts by torch has only now imported it.
        require_own_versions(supervision.versions, shard.spec)
        return collected
    except StageFault as error:
        fault = error
    # What the environment raised stays here: it may be of a kind that cannot be sent.
    fault.__cause__ = fault.__context__ = None
    raise fault.with_traceback(None)


def try_environment(spec: SamplerSpec, supervision: Supervision) -> EnvError | None:
    """Make an environment once and draw a task, before the trainer does: it cannot survive one that hangs or crashes.

    Returns:
        Why it cannot be used, if so: Dask would log an error that is raised, with its traceback.
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
            f"its process was stopped (SIGSTOP, by itself or from outside) and had not gone on after "
            f"{timeout_seconds:g} s, so it was ended; required an answer in time"
        )
    if recordings[-1].timed_out:
        return (
            f"did not return within {timeout_seconds:g} s, so its process was ended; required an answer in time. "
            "If it needs longer, give it longer: --step-timeout SECONDS"
        )
    if recordings[-1].traceback:
        return f"its process died{times}: {recordings[-1].traceback.splitlines()[0]}"
    told = ending or "as by os._exit, or by kill -9 from outside or for lack of memory"
    return f"its process died{times} without a word, {told}; required that it stays alive"
