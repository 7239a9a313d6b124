"""Rollouts on Dask worker processes, which are local or belong to an existing scheduler.

Dask is used as a plain client within a stage: task runners that orchestrate every shard cost 7 to 30 times as much and
repeat finished work when a worker dies.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

from distributed import Future, KilledWorker

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.backend import Backend, Traffic
from metaloom.flows.rollouts.connection import Connection, NoWorkerError, Patience, connected, no_worker_for, wait_for
from metaloom.flows.rollouts.flight_recorder import Recording, recordings_folder, remove_recordings
from metaloom.flows.rollouts.guard import NOT_YET, register_trainer
from metaloom.flows.rollouts.local_cluster import ending_of
from metaloom.flows.rollouts.supervised import (
    CollectedShard,
    Shard,
    Supervision,
    collect_watched,
    fingerprint,
    num_bytes,
    try_environment,
)
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
    """Return the maximum number of environment steps per task in one block of episodes."""
    return spec.episodes_at_once * spec.episodes_per_trial * spec.max_episode_steps


def tasks_per_shard(num_tasks: int, seconds_per_task: float, threads: int = 0) -> int:
    """Return the number of tasks per shard, a power of two, since workers cache simulators for few sizes.

    A shard gets an eighth of the rollout batch's work. Its duration is at least LEAST_SECONDS_PER_SHARD, below which
    overhead dominates, and at most SECONDS_PER_SHARD. With enough tasks, there are at least FEWEST_SHARDS shards and
    two per thread.
    """
    seconds = min(SECONDS_PER_SHARD, max(LEAST_SECONDS_PER_SHARD, num_tasks * seconds_per_task / _ENOUGH_SHARDS))
    most = min(seconds / seconds_per_task, num_tasks / max(FEWEST_SHARDS, _SHARDS_PER_THREAD * threads))
    return 1 << max(0, int(most).bit_length() - 1)


_MOST_PARDONS = 10


@dataclass
class ShardAttempt:
    """A shard with its parameters, its current attempt, and the number of deaths that Dask wrongly blamed on it.

    The result stays on a worker as long as there is a reference to its future.
    """

    shard: Shard
    params: TaskParams
    watch: Supervision
    future: "Future[CollectedShard] | None" = None
    pardons: int = 0
    answer: CollectedShard | None = None


@dataclass(frozen=True)
class DaskWorkers(RolloutWorkers):
    """Rollouts on Dask workers. Copies with other sampler settings share the connection, traffic and costs."""

    connection: Connection
    watch: Supervision  # each piece of work gets a copy with its own key
    elsewhere: bool  # True if workers may be on other machines
    totals: Traffic = field(default_factory=Traffic)
    costs: dict[str, float] = field(default_factory=dict[str, float])  # latest seconds per task, keyed by spec

    @classmethod
    @contextmanager
    def started(cls, spec: SamplerSpec, backend: Backend) -> Iterator["DaskWorkers"]:
        """Yield the workers of a backend; remove their recordings at the end."""
        session, elsewhere, timeout = secrets.token_hex(8), backend.scheduler is not None, backend.step_timeout_seconds
        assert timeout is not None
        try:
            with connected(backend, spec, session) as connection:
                watch = Supervision(session, "", timeout, fingerprint(spec))
                workers = cls(spec, connection, watch, elsewhere)
                register_trainer(recordings_folder(session), session, spec.env.name)
                try:
                    if not spec.env.is_built_in:  # local workers are not tried in advance
                        workers.try_environment()
                    yield workers
                finally:
                    if elsewhere:
                        with suppress(Exception):
                            connection.client.run(remove_recordings, session, on_error="ignore")
        finally:
            # Only after the local workers have ended, since one may just have started to record.
            remove_recordings(session)

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        whole, bounds = Shard(self.spec, tasks, position), self.bounds(len(tasks))

        def collect() -> list[CollectedShard]:
            parts = (ShardAttempt(whole.part(*ends), params.slice(*ends), self.supervise()) for ends in bounds)
            return self._results([*parts])

        where = f"iteration {position.iteration}, inner step {position.step}"
        answers = self.connection.repeat_where_lost(collect, where)
        self.costs[self.spec.model_dump_json()] = sum(answer.cost for answer in answers) / len(tasks)
        return tasks_together([answer.episodes for answer in answers])

    def bounds(self, num_tasks: int) -> list[tuple[int, int]]:
        """Return each shard's task range as (first, last + 1), in order."""
        seconds = self.costs.get(self.spec.model_dump_json()) or most_steps(self.spec) / _STEPS_PER_SECOND
        size = tasks_per_shard(num_tasks, seconds, self.connection.num_threads)
        return list(pairwise([*range(0, num_tasks, size), num_tasks]))

    def traffic(self) -> Traffic:
        return replace(self.totals, threads=self.connection.num_threads)

    def try_environment(self) -> None:
        """Build the environment once on a worker; raise EnvError if that fails."""
        watch, client, name = self.supervise(), self.connection.client, self.spec.env.name
        future = client.submit(try_environment, self.spec, watch, key=f"try_environment-{watch.key}", pure=False)
        try:
            wait_for(client, [future], watch.step_timeout_seconds)
            unusable = future.result()
        except TimeoutError as error:
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks did not return within "
                f"{watch.step_timeout_seconds:g} s; if it needs more time, pass --step-timeout SECONDS\n{error}"
            ) from None
        except KilledWorker as error:
            traceback = "\n".join(recording.traceback for recording in self.recordings(watch)[-1:])
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks killed every process that tried it\n{traceback}"
            ) from error
        if unusable is not None:
            raise unusable

    def supervise(self) -> Supervision:
        """Return supervision settings with a new key, for a new piece of work."""
        return replace(self.watch, key=secrets.token_hex(8))

    def recordings(self, watch: Supervision) -> list[Recording]:
        """Return the recordings that dead processes left on this machine or on the workers' machines."""
        found = [watch.recordings()]
        if self.elsewhere:
            with suppress(Exception):
                everywhere = self.connection.client.run(watch.recordings, on_error="ignore")
                found.extend(cast(dict[str, list[Recording]], everywhere).values())
        # Workers on the same machine return the same recordings.
        return max(found, key=len)

    def _results(self, pieces: Sequence[ShardAttempt]) -> list[CollectedShard]:
        """Return the results of the shards, in order. Raises CancelledError if the scheduler is lost."""
        try:
            for piece in pieces:
                self._submit(piece)
            patience = Patience(self.connection.client, pieces[0].watch.step_timeout_seconds)
            while waiting := [piece for piece in pieces if piece.answer is None]:  # results are fetched as they arrive
                if patience.any_done([cast(Future[CollectedShard], piece.future) for piece in waiting]):
                    self._gather_done(waiting)
        finally:
            # After an error, cancel the other work, which would occupy workers.
            self.connection.client.cancel([p.future for p in pieces if p.answer is None and p.future is not None])
        return [cast(CollectedShard, piece.answer) for piece in pieces]

    def _submit(self, piece: ShardAttempt) -> None:
        self.totals.submitted += 1
        self.totals.sent_bytes += num_bytes((piece.shard.tasks, piece.params))
        piece.future = self.connection.client.submit(
            collect_watched,
            piece.shard,
            piece.params,
            piece.watch,
            # Keys must be unique across runs and attempts, since a scheduler may remember results.
            key=f"{piece.shard.name}-{self.watch.session}-{self.totals.submitted}",
            # Dask derives keys of pure work from its arguments; avoid hashing megabytes.
            pure=False,
        )

    def _gather_done(self, waiting: Sequence[ShardAttempt]) -> None:
        """Fetch the results that are available; resubmit shards that Dask wrongly blames, and raise other errors."""
        done: list[ShardAttempt] = []
        for piece in waiting:
            assert piece.future is not None
            if (status := piece.future.status) in ("error", "cancelled"):
                self._after_failure(piece, piece.future)
            elif status == "finished":
                done.append(piece)
        try:
            answers = cast(list[CollectedShard], self.connection.client.gather([piece.future for piece in done]))
        except KilledWorker:  # a result was lost with its worker; the failed attempt is handled in the next call
            return
        for piece, answer in zip(done, answers, strict=True):
            piece.answer = answer
            self.totals.received_bytes += num_bytes(answer)

    def _after_failure(self, piece: ShardAttempt, future: Future[CollectedShard]) -> None:
        try:
            future.result()
        except KilledWorker as error:
            # Dask blames all tasks assigned to a dead worker, including waiting ones.
            begun = self.recordings(piece.watch)
            if len(begun) > error.allowed_failures or piece.pardons >= _MOST_PARDONS:
                raise self._death(piece.shard, piece.watch, begun) from error
            piece.pardons += 1
            self.totals.repeated += 1
            self._submit(piece)
        except NoWorkerError as error:  # the scheduler gave up
            raise no_worker_for(error.timeout) from None

    def _death(self, shard: Shard, watch: Supervision, begun: Sequence[Recording]) -> Exception:
        """Return the error for a shard that killed every worker that tried it."""
        ending = ending_of(begun[-1].at.pid) if begun and not self.elsewhere else None
        recordings = self.recordings(watch)  # again, since the worker may only now have recorded why it ended
        # An attempt may be cut short because the previous one broke its worker's connections.
        recordings = [recording for recording in recordings if recording.at.env_step != NOT_YET] or recordings
        if recordings and len({recording.place for recording in recordings}) == 1:
            return shard.death(recordings, watch, ending)
        places = [recording.place for recording in recordings]
        at, stop = shard.position, shard.position.first_task + len(shard.tasks)
        return WorkersError(
            f"iteration {at.iteration}, inner step {at.step}: several workers in a row died in the same "
            f"shard, tasks {at.first_task} to {stop - 1}, but at different points (first task, first episode, step, "
            f"row: {places}): they may lack memory, or were killed from outside. Stored data is safe; continue with "
            "`metaloom resume`"
        )
