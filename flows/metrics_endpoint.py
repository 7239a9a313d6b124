"""Prometheus metrics for a training run, served to this machine while the process trains."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app, start_http_server

from metaloom.flows.errors import UsageError
from metaloom.flows.loggers.numbers import scalars
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.backend import Traffic
from metaloom.flows.viewer.gate import REQUIRED_HOST, names_this_machine
from metaloom.storage import StageRef

LOOPBACK = "127.0.0.1"


class TrainingMetrics:
    """Prometheus metrics for one run, in a separate registry."""

    def __init__(self, run: str) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self._run = run
        self._done = self._gauge("iterations_done", "Complete iterations.")
        self._planned = self._gauge("iterations_planned", "Target number of iterations.")
        self._ended = self._gauge("iteration_ended_timestamp_seconds", "End of the last iteration.")
        self._stage = self._gauge("stage_running", "1 for the running stage, 0 for others.", "stage")
        self._metric = self._gauge("metric", "Metrics of the last iteration and the last evaluation.", "name")
        self._threads = self._gauge("worker_threads", "Threads of all connected workers.")
        self._seconds = self._counter("stage_seconds", "Wall-clock seconds by stage.", "stage", "step")
        self._steps = self._counter("environment_steps", "Environment steps sampled.")
        self._shards = self._counter("shards", "Shards sent to workers; again: after a worker died.", "attempt")
        self._bytes = self._counter("worker_bytes", "Bytes sent between trainer and workers.", "direction")
        self._before = Traffic()
        self._running: str | None = None

    def stage_started(self, ref: StageRef) -> None:
        if self._running is not None:
            self._stage.labels(self._run, self._running).set(0)
        self._running = ref.stage
        self._stage.labels(self._run, ref.stage).set(1)

    def iteration_done(self, report: IterationReport) -> None:
        """Record the durations, metrics and traffic of a completed iteration."""
        self._done.labels(self._run).set(report.iteration + 1)
        self._planned.labels(self._run).set(report.iterations)
        self._ended.labels(self._run).set(time.time())
        self._steps.labels(self._run).inc(report.steps)
        for place, seconds in report.stage_seconds.items():
            stage, _, step = place.rpartition(".")
            self._seconds.labels(self._run, stage, step).inc(seconds)
        for name, value in scalars(report).items():
            self._metric.labels(self._run, name).set(value)
        if (now := report.traffic) is not None:
            before, self._before = self._before, now
            again = now.repeated - before.repeated
            self._threads.labels(self._run).set(now.threads)
            self._shards.labels(self._run, "first").inc(now.submitted - before.submitted - again)
            self._shards.labels(self._run, "again").inc(again)
            self._bytes.labels(self._run, "sent").inc(now.sent_bytes - before.sent_bytes)
            self._bytes.labels(self._run, "received").inc(now.received_bytes - before.received_bytes)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, ("run", *labels), namespace="metaloom", registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("run", *labels), namespace="metaloom", registry=self.registry)


@contextmanager
def metrics_at(port: int, run: str, observer: Observer) -> Iterator[Observer]:
    """Yield an observer whose metrics are served at `http://127.0.0.1:PORT/metrics` during the block."""
    if not 1 <= port <= 65535:
        raise UsageError(f"--metrics-port must be between 1 and 65535, got {port}")
    metrics = TrainingMetrics(run)
    app = make_wsgi_app(metrics.registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if names_this_machine([environ.get("HTTP_HOST", "")]):
            return app(environ, start_response)
        # Reject requests from pages of other hosts.
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [f"{REQUIRED_HOST}\n".encode()]

    try:
        # The server listens immediately, but has no metrics before the block.
        server, thread = start_http_server(port, LOOPBACK, registry=metrics.registry)
        server.set_app(answer)
    except OSError as error:
        raise UsageError(f"--metrics-port {port} cannot be opened ({error.strerror}); use a free port") from None

    try:
        yield observer.after(metrics.stage_started, metrics.iteration_done)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
