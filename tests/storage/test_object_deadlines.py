"""Object stores that do not answer: every request has a deadline, and whoever waits is told. Real sockets."""

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import fsspec.asyn
import pytest
import s3fs

from metaloom.storage.errors import StorageFailed
from metaloom.storage.remote.objects import TIMEOUT, TRIES, ObjectFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore"),
]
NOT_IN_TIME = "no complete answer in time"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nETag: x\r\n\r\n"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv(TIMEOUT, "0.4")
    monkeypatch.setenv(TRIES, "2")


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def byte_by_byte(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD)
    while not over.wait(0.1):
        connection.sendall(b"x")


def dies_in_mid_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"x" * 1000)


def overloaded(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def server(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[tuple[str, list[int]]]:
    """The address of a server that answers every request in a way, and a list that grows with each."""
    asked: list[int] = []
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client gives up
            request = connection.recv(65536)
            if request.startswith(b"HEAD") and answer in (byte_by_byte, dies_in_mid_body):
                connection.sendall(HEAD)
                request = connection.recv(65536)
            if request:
                asked.append(1)
                answer(connection, over)

    def accept(listener: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (silent, r"no answer for 0.4 s"),
        (byte_by_byte, NOT_IN_TIME),
        (dies_in_mid_body, r"ClientPayloadError|IncompleteRead|ResponseStreamingError"),
        (overloaded, r"Service Unavailable"),
    ],
)
def test_a_request_that_gets_no_answer_is_made_again_with_a_word_and_then_fails(answer, found, monkeypatch, caplog):
    with server(answer) as (address, asked), caplog.at_level(logging.WARNING):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        url = f"s3://bucket/{answer.__name__}"
        with pytest.raises(StorageFailed, match=f"({found}).*, 2 times; .*metaloom resume"):
            ObjectFolder(url).get_all(["a"], num_bytes=1)
        (warning,) = caplog.messages
        assert warning.startswith(f"{url}: ")
        assert warning.endswith("trying again (2 of 2)")
        assert len(asked) == 2
        if answer is silent:
            with pytest.raises(StorageFailed, match=f"{NOT_IN_TIME}, 2 times"):
                ObjectFolder(url).put_new("a", b"content")


@pytest.mark.parametrize(
    ("address", "found"),
    [("http://127.0.0.1:1", "Could not connect"), ("http://no-such-host.invalid", "Could not connect")],
)
def test_a_store_that_is_not_there_is_asked_again_and_then_named(address, found, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(StorageFailed, match=f"{found}.*, 2 times"):
        ObjectFolder(f"s3://bucket/{address[7:]}").put_all({"a": b"content"})
    assert "trying again (2 of 2)" in caplog.text


def _requests_under_way() -> list[str]:
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks(fsspec.asyn.get_loop())]
    return [name for name in names if "put" in name or "_run_coro" in name]


def test_requests_that_a_deadline_has_ended_do_not_go_on_unheard(monkeypatch, caplog):
    with server(byte_by_byte) as (address, _), caplog.at_level(logging.ERROR, "asyncio"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        objects = ObjectFolder("s3://bucket/several")
        with pytest.raises(StorageFailed, match="2 times"):
            objects.put_all({name: b"content" for name in "abc"})
        tries = 0
        while left := _requests_under_way():  # which are being ended, in the thread that makes them
            tries += 1
            assert tries < 600, left
            time.sleep(0.05)
    gc.collect()  # a task whose error nobody has asked for says so when it goes
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [(TIMEOUT, value, "0.001 to 86400. The default is 20") for value in ("0", "-1", "soon", "nan", "86401")]
    + [(TRIES, value, "1 to 86400. The default is 5") for value in ("0", "86401")],
)
def test_a_deadline_that_is_none_is_refused(name, value, needed, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(StorageFailed, match=f"{name}: '{value}'; this needs a number from {needed}"):
        ObjectFolder("s3://bucket/none").get_all(["a"])
