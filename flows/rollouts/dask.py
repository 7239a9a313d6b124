"""Rollouts on Dask worker processes, local or at a scheduler's address.

Dask is used as a plain client inside one stage: task runners that make every shard an orchestrated task cost 7 to 30
times as much and run finished work again when a worker dies.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from distributed import Client, KilledWorker

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.rollouts.connection import Connection, connected
from metaloom.flows.rollouts.flight_recorder import Recording, recordings_folder, remove_recordings
from metaloom.flows.rollouts.guard import NOT_YET, tell_who_trains
from metaloom.flows.rollouts.local_cluster import ending_of
from metaloom.flows.rollouts.rounds import Piece, Rounds, ShardDied, pieces_of
from metaloom.flows.rollouts.shards import ShardCosts
from metaloom.flows.rollouts.supervised import Collected, Shard, Supervision, try_environment
from metaloom.flows.rollouts.traffic import Traffic
from metaloom.flows.rollouts.versions import fingerprint
from metaloom.flows.rollouts.waiting import wait_for
from metaloom.flows.rollouts.workers import RolloutWorkers, SamplerSpec
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.rollouts.sampler import tasks_together

T = TypeVar("T")


@dataclass(frozen=True)
class DaskWorkers(RolloutWorkers):
    """Rollouts on Dask workers.

    Attributes:
        connection: Connection to the workers' scheduler.
        session: Names the workers' recordings, and their work at the scheduler.
        elsewhere: True if workers may be on other machines.
        supervise: Makes the supervision of a piece of work.
        rounds: Rollout batches so far.
        costs: Costs of tasks so far.
    """

    connection: Connection
    session: str
    elsewhere: bool
    supervise: Callable[[], Supervision]
    rounds: Rounds
    costs: ShardCosts = field(default_factory=ShardCosts)

    @classmethod
    @contextmanager
    def started(cls, spec: SamplerSpec, backend: Backend) -> Iterator["DaskWorkers"]:
        """Start the workers of a backend, whose recordings are removed at the end.

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
                workers = cls(spec, connection, session, elsewhere, supervise, rounds)
                tell_who_trains(recordings_folder(session), session, spec.env.name)
                try:
                    if not spec.env.is_built_in:  # one of ours is not tried before it is used
                        workers.try_environment()
                    yield workers
                finally:
                    if elsewhere:
                        with suppress(Exception):
                            workers.client.run(remove_recordings, session, on_error="ignore")
        finally:
            # Once the local workers are gone: one that is asked to end may just have begun to record.
            remove_recordings(session)

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task.

        Raises:
            RolloutError: the environment failed, hung, or killed its workers.
            WorkersError: workers died at different steps, or are gone; or the scheduler has gone for good.
        """
        bounds = self.costs.bounds(self.spec, len(tasks), self.connection.num_threads)
        pieces: list[Piece] = []

        def collect() -> list[Collected]:
            pieces[:] = pieces_of(Shard(self.spec, tasks, position), params, bounds)
            return self.rounds.collect(pieces)

        try:
            answers = self.uninterrupted(collect, f"iteration {position.iteration}, inner step {position.step}")
        except ShardDied as death:
            raise self._death(death.shard, death.watch) from death.__cause__
        self.costs.tell(self.spec, sum(answer.cost for answer in answers) / len(tasks))
        return tasks_together([answer.episodes for answer in answers])

    def uninterrupted(self, work: Callable[[], T], where: str) -> T:
        """Do work at the scheduler and return its result; repeat it all if the scheduler dies meanwhile and comes back.

        Raises:
            WorkersError: the scheduler does not come back, or it is lost over and over.
        """
        return self.connection.repeat_where_lost(work, where)

    def traffic(self) -> Traffic:
        """Return the totals of the traffic between this process and its workers."""
        return replace(self.rounds.traffic, threads=self.connection.num_threads)

    @property
    def client(self) -> Client:
        """Of the workers' scheduler."""
        return self.connection.client

    def try_environment(self) -> None:
        """Have a worker make the environment once."""
        watch = self.supervise()
        future = self.client.submit(try_environment, self.spec, watch, key=f"try_environment-{watch.key}", pure=False)
        name = self.spec.env.name
        try:
            wait_for(self.client, [future], watch.step_timeout_seconds)
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
        """Make the error for a shard that killed every worker that tried it."""
        recordings = self.rounds.recordings(watch)
        ending = ending_of(recordings[-1].pid) if recordings and not self.elsewhere else None
        recordings = self.rounds.recordings(watch)  # again: it may have been cut off before it said why it ended
        # An attempt may be cut short before it gets there, by what the one before has left of its worker's connections.
        recordings = [recording for recording in recordings if recording.env_step != NOT_YET] or recordings
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
    # Workers of one machine answer alike.
    return max(found, key=len)
