"""A Dask cluster of processes that somebody starts again whenever they end, as systemd, compose or Kubernetes would."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from prefect_server import free_port, wait_for

from metaloom import storage

ROOT = Path(storage.__file__).parents[1]


class Kept:
    """A process of Dask's that is started again when it ends."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "dask", *arguments, "--host", "127.0.0.1", "--no-dashboard"]
        self.starts, self._stopped = 0, Event()
        self._process = self._started()
        self._thread = Thread(target=self._keep)
        self._thread.start()

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Have it stay away."""
        self._stopped.set()
        self._process.kill()
        self._thread.join()

    def _started(self) -> "subprocess.Popen[bytes]":
        self.starts += 1
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(self._command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    def _keep(self) -> None:
        while True:
            self._process.wait()
            if self._stopped.is_set():
                return
            self._process = self._started()


class KeptCluster:
    """A scheduler and its workers, of one thread each."""

    def __init__(self, workers: int) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.scheduler = Kept("scheduler", "--port", str(self.port))
        self.workers = [Kept("worker", self.address, "--nthreads", "1", "--no-nanny") for _ in range(workers)]

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        for part in (*self.workers, self.scheduler):
            part.end()


@contextmanager
def kept_cluster(workers: int) -> Iterator[KeptCluster]:
    cluster = KeptCluster(workers)
    try:
        wait_for(cluster.listens, "the scheduler listens")
        yield cluster
    finally:
        cluster.end()
