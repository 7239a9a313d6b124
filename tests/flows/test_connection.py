"""A scheduler that is lost: work is done again when it is back, within limits. tests/reliability has a real one."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import dask.config
import pytest
from distributed import Client, LocalCluster
from distributed.batched import BatchedSend
from distributed.comm import CommClosedError

import metaloom.flows.rollouts.connection
from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.connection import (
    Connection,
    NobodyThere,
    PausedWorkers,
    _require_same_code,
    connected,
)
from metaloom.flows.rollouts.workers import Backend, SamplerSpec
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.schema import ConfigError

ABSENT = NobodyThere("no Dask scheduler answers")


class FakeClient:
    status = "running"


class FakeScheduler:
    """Connections to it succeed or fail as told, the last of these for ever."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = [*outcomes]
        self.opened = list[FakeClient]()
        self.closed = list[FakeClient]()

    @contextmanager
    def connect(self) -> Iterator[Client]:
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if outcome is not None:
            raise outcome
        client = FakeClient()
        self.opened.append(client)
        yield cast(Client, client)
        self.closed.append(client)


def work_that(connection: Connection, ends: Sequence[Any]) -> Callable[[], Any]:
    """Work that fails with these errors, one at a time, or gives the first other thing."""
    left = [*ends]

    def work() -> Any:
        end = left.pop(0)
        if end == "disconnected":
            connection.client.status = "connecting"
            raise KeyError("workers")
        if isinstance(end, Exception):
            raise end
        return end

    return work


def repeated(scheduler: FakeScheduler, *ends: Any) -> Any:
    with ExitStack() as opened:
        connection = Connection(scheduler.connect, opened)
        return connection.repeat_where_lost(work_that(connection, ends), "iteration 3")


def test_an_empty_address_is_refused_before_anything_is_started():
    spec = cast(SamplerSpec, None)
    with pytest.raises(NobodyThere, match="no Dask scheduler answers at "), connected(Backend(scheduler=""), spec, ""):
        pytest.fail("it connected")


def test_a_worker_that_cannot_load_a_plug_in_is_named():
    client = cast(Client, SimpleNamespace(run=lambda *given, **how: {"tcp://w:1": ConfigError("no module own")}))
    with pytest.raises(WorkersError, match=r"the Dask worker at tcp://w:1 cannot load .*plug-ins: no module own"):
        _require_same_code(client, SamplerSpec.of(build_config({"env": "point-corner", "algorithm": "promp"}), 1))


@pytest.mark.parametrize("error", [ValueError("of the work"), WorkersError("told already")])
def test_an_error_of_the_work_itself_is_not_taken_for_a_lost_scheduler(error):
    scheduler = FakeScheduler(None)
    with pytest.raises(type(error), match=str(error)):
        repeated(scheduler, error, "done")
    assert len(scheduler.opened) <= 1


@pytest.mark.parametrize("lost", [CancelledError(), CommClosedError("in <TCP>: Stream is closed"), "disconnected"])
def test_work_is_done_again_by_another_client_when_the_scheduler_is_back(lost, caplog):
    scheduler = FakeScheduler(None, ABSENT, ABSENT, None)
    with ExitStack() as opened:
        connection = Connection(scheduler.connect, opened)
        assert connection.repeat_where_lost(work_that(connection, [lost, "done"]), "iteration 3") == "done"
        assert (len(scheduler.opened), scheduler.closed) == (2, scheduler.opened[:1])
        assert connection.client is scheduler.opened[1]
    assert scheduler.closed == scheduler.opened
    assert [record.getMessage() for record in caplog.records] == [
        "iteration 3: the Dask scheduler is gone; waiting up to 300 s for it to come back",
        "iteration 3: the Dask scheduler is back after 0 s; repeating this stage",
    ]


def test_a_connection_that_is_lost_during_a_write_is_not_logged_with_a_traceback(caplog):
    async def write(*_, **__):
        written.set()
        raise CommClosedError

    async def send():
        stream = BatchedSend(interval=0)
        stream.start(Mock(closed=lambda: False, write=write))
        stream.send("a message")
        await written.wait()
        stream.abort()

    written = asyncio.Event()
    with caplog.at_level(logging.INFO):
        asyncio.run(send())
    assert "Traceback" not in caplog.text


def test_a_client_that_is_closed_while_it_reconnects_is_not_logged_with_a_traceback(caplog):
    async def close_meanwhile():
        async with LocalCluster(n_workers=0, asynchronous=True, dashboard_address=None) as scheduler:
            client = await Client(scheduler.scheduler_address, asynchronous=True, timeout=10)
        while client.status != "connecting":
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(close_meanwhile())
    assert "Traceback" not in caplog.text


def test_what_fails_for_another_reason_is_not_done_again():
    scheduler = FakeScheduler(None)
    with pytest.raises(KeyError, match="mine"):
        repeated(scheduler, KeyError("mine"), "done")
    assert len(scheduler.opened) == 1


def test_a_scheduler_that_is_lost_over_and_over_is_given_up():
    with pytest.raises(WorkersError, match=r"iteration 3: .* lost 4 times in this stage"):
        repeated(FakeScheduler(None), *[CancelledError()] * 4)


def test_a_scheduler_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_BACK_SECONDS", 0.0)
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "no_worker_seconds", lambda: 0.0)
    with pytest.raises(WorkersError, match=r"iteration 3: .* no Dask scheduler answers.*metaloom resume"):
        repeated(FakeScheduler(None, ABSENT), CancelledError())


def test_workers_that_come_back_with_other_code_end_the_run_at_once():
    with pytest.raises(WorkersError, match="different versions"):
        repeated(FakeScheduler(None, WorkersError("has different versions")), CancelledError())


def test_a_worker_that_cannot_import_what_rollouts_need_is_told_with_the_remedy(tiny_config, monkeypatch):
    spec, connection = SamplerSpec.of(tiny_config(), 1), metaloom.flows.rollouts.connection
    answers = {"a": OSError("has left"), "b": ImportError("no robots")}
    client: Any = SimpleNamespace(run=lambda *_, on_error: answers)
    message = r"^a Dask worker cannot import what rollouts need \(no robots\)\. .*: install them there, or start"
    with pytest.raises(WorkersError, match=message):
        connection._require_same_code(client, spec)
    answers["b"] = RuntimeError("of the worker")
    with pytest.raises(RuntimeError, match="of the worker"):
        connection._require_same_code(client, spec)
    cancelled = list[bool]()
    client.submit = lambda *_, **__: SimpleNamespace(cancel=lambda: cancelled.append(True))
    for ended, kind, found in (
        (ImportError("no robots"), WorkersError, message),
        (PausedWorkers("all are paused"), NobodyThere, "^all are paused$"),
        (WorkersError("none"), NobodyThere, "^the Dask scheduler at there has no worker; start one with `dask worker"),
    ):
        monkeypatch.setattr(connection, "wait_for", Mock(side_effect=ended))
        with pytest.raises(kind, match=found):
            connection._wait_for_a_worker(client, "there")
    assert len(cancelled) == 3


def test_a_worker_is_waited_for_a_minute_unless_dask_is_set_otherwise():
    for setting, seconds in ((None, 60), ("15m", 900)):
        with dask.config.set({"distributed.scheduler.no-workers-timeout": setting}):
            assert metaloom.flows.rollouts.connection.no_worker_seconds() == seconds


def test_nobody_has_threads_while_the_scheduler_is_gone():
    with ExitStack() as opened:
        connection = Connection(FakeScheduler(None).connect, opened)
        connection.client.status = "closed"
        assert connection.num_threads == 0


@pytest.mark.parametrize(
    ("first_words", "told"),
    [(b"", "does not respond: it is suspended"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a Dask scheduler")],
)
def test_what_is_no_scheduler_is_told_though_it_accepts_connections(tiny_config, monkeypatch, first_words, told):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            accepted, _ = server.accept()
            accepted.sendall(first_words)
            accepted.recv(1 << 20)
            accepted.recv(1)  # until it hangs up
            accepted.close()

        answering = Thread(target=answer)
        answering.start()
        backend = Backend(scheduler=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with (
            pytest.raises(NobodyThere, match=rf"no Dask scheduler answers at .*the server there {told}"),
            connected(backend, SamplerSpec.of(tiny_config(), 1), "session"),
        ):
            pass
        answering.join()
