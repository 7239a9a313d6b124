"""Rollouts on Dask worker processes, local or behind a scheduler's address.

Dask is used as a plain client inside one stage: task runners that make every shard an orchestrated task cost 7 to 30
times as much and run finished work again when a worker dies.
"""

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from typing import cast

from distributed import Client, Future, KilledWorker, wait

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.flight_recorder import Recording, recordings_folder, remove_recordings
from metaloom.flows.rollouts.guard import NOT_YET, tell_who_trains
from metaloom.flows.rollouts.local_cluster import ending_of, local_client
from metaloom.flows.rollouts.supervised import Shard, Supervision, collect_watched, is_built_in, try_environment
from metaloom.flows.rollouts.workers import Backend, RolloutWorkers, SamplerSpec, code_digest
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.rollouts.blocks import tasks_together

_ANSWER_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 5.0
_NO_WORKER_SECONDS = 60.0


@dataclass(frozen=True)
class DaskWorkers(RolloutWorkers):
    """Rollouts on Dask workers, one shard of tasks for each of their threads.

    Attributes:
        client: of the workers' scheduler.
        session: names the recordings of what they do.
        step_timeout_seconds: how long a call of an environment may take.
        elsewhere: workers may be on other machines.
    """

    client: Client
    session: str
    step_timeout_seconds: float
    elsewhere: bool

    @classmethod
    @contextmanager
    def started(cls, spec: SamplerSpec, backend: Backend) -> Iterator["DaskWorkers"]:
        """Workers of a backend, whose recordings are removed in the end.

        Raises:
            WorkersError: as `dask_client`.
            EnvError: its workers cannot build the environment.
        """
        session = secrets.token_hex(8)
        with dask_client(backend, spec, session) as client, cls._watched(spec, client, backend, session) as workers:
            yield workers

    @classmethod
    @contextmanager
    def _watched(cls, spec: SamplerSpec, client: Client, backend: Backend, session: str) -> Iterator["DaskWorkers"]:
        assert backend.step_timeout_seconds is not None
        elsewhere = backend.scheduler is not None
        workers = cls(spec, client, session, backend.step_timeout_seconds, elsewhere)
        tell_who_trains(recordings_folder(session), session, spec.env.name)
        try:
            if not is_built_in(spec):
                workers.try_environment()
            yield workers
        finally:
            workers.clean_up()

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task.

        Raises:
            RolloutError: the environment failed, hung, or killed its workers.
            WorkersError: workers died in different places, or are gone; or the scheduler is gone.
        """
        bounds = list(_shards(len(tasks), self._num_threads()))
        shards = [
            Shard(self.spec, tasks.slice(*ends), replace(position, first_task=position.first_task + ends[0]))
            for ends in bounds
        ]
        watches = [self._supervision() for _ in shards]
        futures = [
            # Dask names pure work by its arguments; hashing megabytes to save nothing is a waste.
            self.client.submit(collect_watched, shard, params.slice(*ends), watch, pure=False)
            for ends, shard, watch in zip(bounds, shards, watches, strict=True)
        ]
        try:
            self._wait(futures)
            return tasks_together(cast(list[EpisodeBatch], self.client.gather(futures)))
        except KilledWorker as error:
            dead = next(n for n, future in enumerate(futures) if future.key == error.task)
            raise self._death(shards[dead], watches[dead]) from error
        except CancelledError as error:
            raise WorkersError(
                f"iteration {position.iteration}, inner step {position.step}: the Dask scheduler is gone (its "
                "connection is lost); start it again, or leave --scheduler out, and `metaloom resume` the run, which "
                "has lost nothing"
            ) from error
        finally:
            # After an error the others' work is of no use, and holds the workers.
            self.client.cancel([future for future in futures if not future.done()])

    def try_environment(self) -> None:
        """Have a worker make the environment once.

        Raises:
            EnvError: it cannot be made, hangs, or kills its process.
        """
        watch = self._supervision()
        future = self.client.submit(try_environment, self.spec, watch, pure=False)
        name = self.spec.env.name
        try:
            self._wait([future])
            unusable = future.result()
        except TimeoutError as error:
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks did not return within "
                f"{self.step_timeout_seconds:g} s; if it needs longer, give it longer: --step-timeout SECONDS\n{error}"
            ) from None
        except KilledWorker as error:
            told = "\n".join(recording.traceback for recording in self._recordings(watch)[-1:])
            raise EnvError(
                f"env.name is {name!r}: its constructor or sample_tasks killed every process that tried it\n{told}"
            ) from error
        if unusable is not None:
            raise unusable

    def clean_up(self) -> None:
        """Remove the recordings, also on the workers' machines, as far as they can still be reached."""
        remove_recordings(self.session)
        if self.elsewhere:
            with suppress(Exception):
                self.client.run(remove_recordings, self.session, on_error="ignore")

    def _supervision(self) -> Supervision:
        return Supervision(self.session, secrets.token_hex(8), self.step_timeout_seconds)

    def _wait(self, futures: Sequence[Future[EpisodeBatch] | Future[EnvError | None]]) -> None:
        """Wait until all are done or one has failed; not for workers that will never come.

        Raises:
            WorkersError: there has been no worker for a minute.
        """
        waiting, alone = set(futures), 0.0
        while waiting and not any(future.status == "error" for future in futures):
            try:
                wait(waiting, timeout=_LOOK_EVERY_SECONDS, return_when="FIRST_COMPLETED")
            except TimeoutError:
                alone = 0.0 if self.client.scheduler_info(n_workers=-1)["workers"] else alone + _LOOK_EVERY_SECONDS
            waiting = {future for future in waiting if not future.done()}
            if waiting and alone >= _NO_WORKER_SECONDS:
                raise WorkersError(
                    f"the Dask scheduler has had no worker for {alone:g} s; start one with `dask worker`, and go on "
                    "with `metaloom resume`"
                )

    def _death(self, shard: Shard, watch: Supervision) -> Exception:
        """Make the error for a shard that killed every worker that tried it."""
        recordings = self._recordings(watch)
        # An attempt may be cut short before it gets there, by what the one before has left of its worker's connections.
        recordings = [recording for recording in recordings if recording.env_step != NOT_YET] or recordings
        if recordings and len({recording.place for recording in recordings}) == 1:
            return shard.death(recordings, watch, None if self.elsewhere else ending_of(recordings[-1].pid))
        places = [recording.place for recording in recordings]
        at, stop = shard.position, shard.position.first_task + len(shard.tasks)
        return WorkersError(
            f"iteration {at.iteration}, inner step {at.step}: several workers in a row died in the "
            f"same shard, tasks {at.first_task} to {stop - 1}, but not in one place (first task, first episode, step, "
            f"row: {places}): they may lack memory, or somebody kills them. What is stored is safe; go on with "
            "`metaloom resume`"
        )

    def _recordings(self, watch: Supervision) -> list[Recording]:
        """Collect what the dead left, on this machine or on those of the workers."""
        found = [watch.recordings()]
        if self.elsewhere:
            with suppress(Exception):
                everywhere = self.client.run(watch.recordings, on_error="ignore")
                found.extend(cast(dict[str, list[Recording]], everywhere).values())
        # Workers of one machine answer alike.
        return max(found, key=len)

    def _num_threads(self) -> int:
        # A worker that was just killed is missing here and counts again once its nanny has restarted it.
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return max(1, sum(worker["nthreads"] for worker in workers))


@contextmanager
def dask_client(backend: Backend, spec: SamplerSpec, session: str) -> Iterator[Client]:
    """A client of the backend's scheduler, or of worker processes of this session that live as long as the context.

    Raises:
        WorkersError: there is no such scheduler, it has no workers, or they run other code than this process.
        EnvError: its workers cannot build the environment.
    """
    workers, retries = backend.workers or 0, backend.retries or 0
    with _connect(backend.scheduler, spec) if backend.scheduler else local_client(workers, retries, session) as client:
        client.forward_logging()  # what environments log, to this process's loggers
        yield client


def check_worker(spec: SamplerSpec) -> dict[str, str]:
    """Report what a worker computes with, after it has built the environment once. Runs on the worker."""
    make_env(spec.env)
    return fingerprint()


def fingerprint() -> dict[str, str]:
    """Versions of everything that decides a rollout's numbers, in this process."""
    packages = ("numpy", "mujoco", "gymnasium")
    return {"metaloom's code": code_digest()[:12]} | {name: version(name) for name in packages}


@contextmanager
def _connect(address: str, spec: SamplerSpec) -> Iterator[Client]:
    try:
        client = Client(address, timeout=_ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, or leave --scheduler out to use processes on this machine"
        ) from None
    except TypeError as error:  # Dask's word for a certificate that it was not given
        raise WorkersError(
            f"found no certificate to connect to {address} with ({error}); required Dask's TLS configuration, as in "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE=ca.pem and __CLIENT__CERT, __CLIENT__KEY (docs/scale.md)"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=30)
        except TimeoutError:
            raise WorkersError(
                f"the Dask scheduler at {address} has no worker; start one with `dask worker {address}`"
            ) from None
        _require_same_code(client, spec)
        yield client


def _require_same_code(client: Client, spec: SamplerSpec) -> None:
    # The records of a run vouch for one set of versions, the trainer's.
    try:
        found = cast(dict[str, dict[str, str]], client.run(check_worker, spec))
    except ImportError as error:
        raise WorkersError(
            f"a Dask worker cannot import what rollouts need ({error}); required the same Metaloom and environment on "
            "every worker: install them there, or start the workers in this folder"
        ) from None
    here = fingerprint()
    for worker, there in found.items():
        differing = [
            f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]
        ]
        if differing:
            raise WorkersError(
                f"the Dask worker at {worker} computes with something else: {'; '.join(differing)}; required the same "
                "versions as the trainer's, or digests would differ"
            )


def _shards(num_tasks: int, num_threads: int) -> Iterator[tuple[int, int]]:
    count = min(num_tasks, num_threads)
    return pairwise(num_tasks * n // count for n in range(count + 1))
