"""Rollouts on Dask worker processes, local or behind a scheduler's address.

Dask is used as a plain client inside one stage: task runners that make every shard an orchestrated task cost 7 to 30
times as much and run finished work again when a worker dies.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from distributed import Client, LocalCluster, Worker, WorkerPlugin

from flows.workers import Backend, SamplerSpec, collect_shard
from pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from stages.collect_rollouts import RolloutPosition

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class DaskWorkers:
    """Rollouts on Dask workers, one shard of tasks for each of them."""

    spec: SamplerSpec
    client: Client

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """E complete episodes of every task."""
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
            for start, stop in _shards(len(tasks), self._num_workers())
        ]
        shards = cast(list[EpisodeBatch], self.client.gather(futures))
        return EpisodeBatch.concatenate(shards)

    def _num_workers(self) -> int:
        # A worker that was just killed is missing here and counts again once its nanny has restarted it.
        return max(1, len(self.client.scheduler_info(n_workers=-1)["workers"]))


@contextmanager
def dask_client(backend: Backend) -> Iterator[Client]:
    """A client of the backend's scheduler, or of worker processes that live as long as the context."""
    with _connect(backend.scheduler) if backend.scheduler else _start(backend.workers) as client:
        yield client


class _IgnoreInterrupts(WorkerPlugin):
    """Ctrl-C reaches every process of the terminal's group; the trainer alone decides what it means."""

    def setup(self, worker: Worker) -> None:
        del worker
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _start(workers: int) -> Iterator[Client]:
    with (
        # Whoever reaches a scheduler can run code on it, so everything listens on the loopback interface. Dask opens an
        # HTTP port even without a dashboard, on all interfaces unless it is told where.
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            worker_dashboard_address=f"{LOOPBACK}:0",
            scheduler_kwargs={"dashboard": False},
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(_IgnoreInterrupts())
        yield client


@contextmanager
def _connect(address: str) -> Iterator[Client]:
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, or leave --scheduler out to use processes on this machine"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=30)
        except TimeoutError:
            raise ConnectionError(
                f"the Dask scheduler at {address} has no worker; start one with `dask worker {address}`"
            ) from None
        yield client


def _shards(num_tasks: int, num_workers: int) -> Iterator[tuple[int, int]]:
    count = min(num_tasks, num_workers)
    return pairwise(num_tasks * n // count for n in range(count + 1))
