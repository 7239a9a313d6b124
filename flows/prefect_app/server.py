"""Prefect's server behind a gate, as `metaloom serve` starts it: `python -P -m metaloom.flows.prefect_app.server`.

It works around faults of Prefect's server, two of them under SQLite:

- Transactions take their lock when they begin, and wait for it. Prefect 3.8 takes it at the first write, which fails at
  once with "database is locked" when another transaction has written since this one has read.
- A batch of events that are all stored already, as clients send after they have lost the server, is no error. Prefect
  3.8 inserts nothing, which SQLite refuses, and drops new events with it.

- Passwords are compared as bytes. Prefect 3.8 compares text, which raises an error (500) where it is not ASCII.

All lean on Prefect's private modules; tests/flows/test_prefect_server.py and test_prefect_databases.py run them in a
real server.
"""

import hmac
import socket
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import sqlalchemy
import uvicorn
from prefect.server.api import middleware, server
from prefect.server.api.server import create_app
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.events.storage import database
from prefect.server.utilities import subscriptions
from prefect.settings import get_current_settings
from sqlalchemy.exc import SADeprecationWarning
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

from metaloom.flows.prefect_app.front import guarded
from metaloom.flows.this_machine import HOSTS


def lock_at_once() -> None:
    """Have every transaction of SQLite that may write take its lock when it begins."""
    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_immediately(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        del with_for_update
        async with begin(self, session, with_for_update=True) as transaction:
            await session.connection()  # begins
            # Not those inside: a request that changes something may read by another session, and wait for itself.
            mode = SQLITE_BEGIN_MODE.set(None)
            try:
                yield transaction
            finally:
                SQLITE_BEGIN_MODE.reset(mode)

    AioSqliteConfiguration.begin_transaction = begin_immediately


def skip_stored_events() -> None:
    """Have SQLite take batches of events that are stored already."""
    module: Any = database
    write = module._write_sqlite_events

    async def write_new(session: AsyncSession, events: list[ReceivedEvent]) -> None:
        event = provide_database_interface().Event
        with warnings.catch_warnings():  # of the kind of column that Prefect made for SQLAlchemy
            warnings.simplefilter("ignore", SADeprecationWarning)
            asked = sqlalchemy.select(event.id).where(event.id.in_([event.id for event in events]))
        stored = {*(await session.scalars(asked)).all()}
        if new := [event for event in events if event.id not in stored]:
            await write(session=session, events=new)

    module._write_sqlite_events = write_new


def compare_bytes() -> None:
    """Have passwords and tokens compared that are not ASCII."""

    def is_same(one: object, other: object) -> bool:
        return hmac.compare_digest(str(one).encode(errors="surrogatepass"), str(other).encode(errors="surrogatepass"))

    modules: list[Any] = [middleware, server, subscriptions]
    for module in modules:
        module.hmac = SimpleNamespace(compare_digest=is_same)


def main(host: str, listening: str) -> None:
    """Serve until SIGTERM.

    Args:
        host: Address to listen on.
        listening: Descriptor of the socket, which `metaloom serve` holds all the time. If the port were free for a
            moment, somebody else could take it and receive the password.
    """
    lock_at_once()
    skip_stored_events()
    compare_bytes()
    settings = get_current_settings().server
    config = uvicorn.Config(
        guarded(create_app(final=True), any_host=host not in HOSTS),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    serving = uvicorn.Server(config)
    serving.run(sockets=[socket.socket(fileno=int(listening))])
    if not serving.started:
        sys.exit("the server did not start")


if __name__ == "__main__":
    main(*sys.argv[1:])
