"""Rollouts on Dask worker processes, local or at a scheduler's address.

Dask is used as a plain client within a stage: task runners that orchestrate every shard cost 7 to 30 times as much and
repeat finished work when a worker dies.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar, cast

from distributed import KilledWorker

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.backend import Backend, Traffic
from metaloom.flows.rollouts.connection import Connection, connected, wait_for
from metaloom.flows.rollouts.flight_recorder import Recording, recordings_folder, remove_recordings
from metaloom.flows.rollouts.guard import NOT_YET, tell_who_trains
from metaloom.flows.rollouts.local_cluster import ending_of
from metaloom.flows.rollouts.rounds import Piece, Rounds, ShardDied, pieces_of
from metaloom.flows.rollouts.supervised import Collected, Shard, Supervision, fingerprint, try_environment
from metaloom.flows.rollouts.workers import RolloutWorkers, SamplerSpec
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.rollouts.sampler import tasks_together

SECONDS_PER_SHARD = 1.0
"""Target duration of a shard with several tasks, which bounds the idle time at the end of a rollout batch."""
LEAST_SECONDS_PER_SHARD = 0.1
FEWEST_SHARDS = 4
_ENOUGH_SHARDS = 8
_SHARDS_PER_THREAD = 2
_STEPS_PER_SECOND = 16_000  # assumed before any measurement


def most_steps(spec: SamplerSpec) -> int:
    """Return the maximum environment steps per task and rollout batch, with one block of episodes."""
    return spec.episodes_at_once * spec.episodes_per_trial * spec.max_episode_steps


def tasks_per_shard(num_tasks: int, seconds_per_task: float, threads: int = 0) -> int:
    """Return the number of tasks per shard: a power of two, since workers cache simulators for few sizes.

    A shard takes an eighth of the rollout batch's work, at least LEAST_SECONDS_PER_SHARD, below which overhead
    dominates, and at most SECONDS_PER_SHARD. With enough tasks there are at least FEWEST_SHARDS, and two per thread.
    """
    seconds = min(SECONDS_PER_SHARD, max(LEAST_SECONDS_PER_SHARD, num_tasks * seconds_per_task / _ENOUGH_SHARDS))
    most = min(seconds / seconds_per_task, num_tasks / max(FEWEST_SHARDS, _SHARDS_PER_THREAD * threads))
    return 1 << max(0, int(most).bit_length() - 1)


T = TypeVar("T")


@dataclass(frozen=True)
class DaskWorkers(RolloutWorkers):
    """Rollouts on Dask workers.

    Attributes:
        rounds: Connection to the workers' scheduler, and rollout batches so far.
        elsewhere: True if workers may be on other machines.
        costs: Measured seconds per task in the last rollout batch of every kind.
    """

    rounds: Rounds
    elsewhere: bool
    costs: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    @contextmanager
    def started(cls, spec: SamplerSpec, backend: Backend) -> Iterator["DaskWorkers"]:
        """Start the workers of a backend; remove their recordings at the end.

        Raises:
            WorkersError: The connection failed; see `connected`.
            EnvError: The workers cannot build the environment.
        """
        session, elsewhere, timeout = secrets.token_hex(8), backend.scheduler is not None, backend.step_timeout_seconds
        assert timeout is not None
        try:
            with connected(backend, spec, session) as connection:
                versions = fingerprint(spec)

                def supervise() -> Supervision:
                    return Supervision(session, secrets.token_hex(8), timeout, versions)

                rounds = Rounds(connection, session, supervise, partial(_recordings, connection, elsewhere))
                workers = cls(spec, rounds, elsewhere)
                tell_who_trains(recordings_folder(session), session, spec.env.name)
                try:
                    if not spec.env.is_built_in:  # local workers are not tried in advance
                        workers.try_environment()
                    yield workers
                finally:
                    if elsewhere:
                        with suppress(Exception):
                            connection.client.run(remove_recordings, session, on_error="ignore")
        finally:
            # After the local workers have ended, since one may just have begun to record.
            remove_recordings(session)

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """Return Return E complete episodes of every task.

        Raises:
            RolloutError: the environment failed, hung, or killed its workers.
            WorkersError: workers died at different steps, or there are no workers, or the scheduler is lost.
        """
        bounds = self.bounds(len(tasks))
        pieces: list[Piece] = []

        def collect() -> list[Collected]:
            pieces[:] = pieces_of(Shard(self.spec, tasks, position), params, bounds, self.rounds.supervise)
            return self.rounds.collect(pieces)

        try:
            answers = self.uninterrupted(collect, f"iteration {position.iteration}, inner step {position.step}")
        except ShardDied as death:
            raise self._death(death.shard, death.watch) from death.__cause__
        self.costs[self.spec.model_dump_json()] = sum(answer.cost for answer in answers) / len(tasks)
        return tasks_together([answer.episodes for answer in answers])

    def bounds(self, num_tasks: int) -> list[tuple[int, int]]:
        """Return the first and last + 1 task of every shard, in order."""
        seconds = self.costs.get(self.spec.model_dump_json()) or most_steps(self.spec) / _STEPS_PER_SECOND
        size = tasks_per_shard(num_tasks, seconds, self.rounds.connection.num_threads)
        return list(pairwise([*range(0, num_tasks, size), num_tasks]))

    def uninterrupted(self, work: Callable[[], T], where: str) -> T:
        """Run work at the scheduler and return its result; repeat it if the scheduler was lost and comes back.

        Raises:
            WorkersError: the scheduler does not come back, or is lost repeatedly.
        """
        return self.rounds.connection.repeat_where_lost(work, where)

    def traffic(self) -> Traffic:
        """Return the totals of the traffic between this process and its workers."""
        return replace(self.rounds.traffic, threads=self.rounds.connection.num_threads)

    def try_environment(self) -> None:
        """Make the environment once on a worker."""
        watch, client = self.rounds.supervise(), self.rounds.client
        future = client.submit(try_environment, self.spec, watch, key=f"try_environment-{watch.key}", pure=False)
        name = self.spec.env.name
        try:
            wait_for(client, [future], watch.step_timeout_seconds)
            unusable = future.result()
        except TimeoutError as error:
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks did not return within "
                f"{watch.step_timeout_seconds:g} s; if it needs longer, give it longer: --step-timeout SECONDS\n{error}"
            ) from None
        except KilledWorker as error:
            told = "\n".join(recording.traceback for recording in self.rounds.recordings(watch)[-1:])
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks killed every process that tried it\n{told}"
            ) from error
        if unusable is not None:
            raise unusable

    def _death(self, shard: Shard, watch: Supervision) -> Exception:
        """Build the error for a shard that killed every worker that tried it."""
        recordings = self.rounds.recordings(watch)
        ending = ending_of(recordings[-1].at.pid) if recordings and not self.elsewhere else None
        recordings = self.rounds.recordings(watch)  # again: it may have been cut off before it said why it ended
        # An attempt may be cut short before it gets there, by what the one before has left of its worker's connections.
        recordings = [recording for recording in recordings if recording.at.env_step != NOT_YET] or recordings
        if recordings and len({recording.place for recording in recordings}) == 1:
            return shard.death(recordings, watch, ending)
        places = [recording.place for recording in recordings]
        at, stop = shard.position, shard.position.first_task + len(shard.tasks)
        return WorkersError(
            f"iteration {at.iteration}, inner step {at.step}: several workers in a row died in the "
            f"same shard, tasks {at.first_task} to {stop - 1}, but not at one point (first task, first episode, step, "
            f"row: {places}): they may lack memory, or somebody kills them. What is stored is safe; continue with "
            "`metaloom resume`"
        )


def _recordings(connection: Connection, elsewhere: bool, watch: Supervision) -> list[Recording]:
    """Collect the recordings of dead processes, on this machine or on the workers' machines."""
    found = [watch.recordings()]
    if elsewhere:
        with suppress(Exception):
            everywhere = connection.client.run(watch.recordings, on_error="ignore")
            found.extend(cast(dict[str, list[Recording]], everywhere).values())
    # Workers of the same machine give the same result.
    return max(found, key=len)
