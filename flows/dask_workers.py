"""Rollouts on Dask worker processes, local or behind a scheduler's address.

Dask is used as a plain client inside one stage: task runners that make every shard an orchestrated task cost 7 to 30
times as much and run finished work again when a worker dies.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import resource_tracker
from typing import cast

from distributed import Client, KilledWorker, LocalCluster
from distributed.client import FutureCancelledError

from flows.errors import WorkersError
from flows.workers import Backend, SamplerSpec, code_digest, collect_shard
from pipeline.envs import make_env
from pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from stages.collect_rollouts import RolloutPosition

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class DaskWorkers:
    """Rollouts on Dask workers, one shard of tasks for each of their threads."""

    spec: SamplerSpec
    client: Client

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task.

        Raises:
            WorkersError: a shard killed every worker that tried it, or the scheduler is gone.
        """
        futures = [
            self.client.submit(
                collect_shard,
                self.spec,
                params.slice(start, stop),
                tasks.slice(start, stop),
                replace(position, first_task=position.first_task + start),
                # Dask names pure work by its arguments; hashing megabytes to save nothing is a waste.
                pure=False,
            )
            for start, stop in _shards(len(tasks), self._num_threads())
        ]
        try:
            shards = cast(list[EpisodeBatch], self.client.gather(futures))
        except KilledWorker as error:
            raise WorkersError(
                f"iteration {position.iteration}, round {position.step}: several workers in a row died in the same "
                "rollout, so the environment probably ends its process; sample in this process (--workers 0) to see how"
            ) from error
        except FutureCancelledError as error:
            raise WorkersError(
                f"iteration {position.iteration}, round {position.step}: the Dask scheduler is gone ({error.reason}); "
                "start it again, or leave --scheduler out, and `metaloom resume` the run, which has lost nothing"
            ) from error
        return EpisodeBatch.concatenate(shards)

    def sampling(self, episodes_per_task: int, *, deterministic: bool) -> "DaskWorkers":
        """The same for another number of episodes."""
        return replace(self, spec=self.spec.sampling(episodes_per_task, deterministic))

    def _num_threads(self) -> int:
        # A worker that was just killed is missing here and counts again once its nanny has restarted it.
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return max(1, sum(worker["nthreads"] for worker in workers))


@contextmanager
def dask_client(backend: Backend, spec: SamplerSpec) -> Iterator[Client]:
    """A client of the backend's scheduler, or of worker processes that live as long as the context.

    Raises:
        WorkersError: there is no such scheduler, it has no workers, or they run other code than this process.
        EnvError: its workers cannot build the environment.
    """
    with _connect(backend.scheduler, spec) if backend.scheduler else _start(backend.workers or 0) as client:
        yield client


def check_worker(spec: SamplerSpec) -> dict[str, str]:
    """What a worker computes with, after it has built the environment once. Runs on the worker."""
    make_env(spec.env)
    return fingerprint()


def fingerprint() -> dict[str, str]:
    """Versions of everything that decides a rollout's numbers, in this process."""
    packages = ("numpy", "mujoco", "gymnasium")
    return {"metaloom's code": code_digest()[:12]} | {name: version(name) for name in packages}


@contextmanager
def _start(workers: int) -> Iterator[Client]:
    with _local_cluster(workers) as cluster, Client(cluster) as client:
        yield client


def _local_cluster(workers: int) -> LocalCluster:
    # Ctrl-C reaches every process of the terminal's group, but the trainer alone decides what it means. Workers inherit
    # the blocked signal, those that are restarted later as well; here it is delivered as soon as they have started.
    # Python's resource tracker unblocks it when it starts, so that has to have happened before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Whoever reaches a scheduler can run code on it, so everything listens on the loopback interface. Dask opens an
        # HTTP port even without a dashboard, on all interfaces unless it is told where.
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            worker_dashboard_address=f"{LOOPBACK}:0",
            scheduler_kwargs={"dashboard": False},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _connect(address: str, spec: SamplerSpec) -> Iterator[Client]:
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, or leave --scheduler out to use processes on this machine"
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
