"""Prefect's server behind a gate, as `metaloom serve` starts it: `python -P -m metaloom.flows.prefect_app.server`.

It works around two faults of Prefect's server under SQLite:

- Transactions take their lock when they begin, and wait for it. Prefect 3.8 takes it at the first write, which fails at
  once with "database is locked" when another transaction has written since this one has read.
- A batch of events that are all stored already, as clients send after they have lost the server, is no error. Prefect
  3.8 inserts nothing, which SQLite refuses, and drops new events with it.

Both lean on Prefect's private modules; tests/flows/test_prefect_server.py and test_prefect_databases.py run them in a
real server.
"""

import socket
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import sqlalchemy
import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.events.storage import database
from prefect.settings import get_current_settings
from sqlalchemy.exc import SADeprecationWarning
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from metaloom.flows.prefect_app.home import OPEN
from metaloom.flows.this_machine import HOSTS
from metaloom.flows.viewer.gate import Gate, refusal_of_other_pages


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


def main(host: str, listening: str) -> None:
    """Serve until SIGTERM.

    Args:
        host: Address to listen on.
        listening: Descriptor of the socket, which `metaloom serve` holds all the time. If the port were free for a
            moment, somebody else could take it and receive the password.
    """
    lock_at_once()
    skip_stored_events()
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


_OPENING = HTMLResponse(
    """<!doctype html>
<meta charset="utf-8">
<title>Metaloom</title>
<p>Opening Prefect's page ...</p>
<script>
  const password = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  fetch("/api/admin/version", { headers: { Authorization: `Basic ${password}` } }).then((answer) => {
    if (!answer.ok) throw new Error(answer.status);
    localStorage.setItem("prefect-password", password);
    location.replace("/");
  }).catch(() => {
    document.querySelector("p").textContent =
      "This is not the address of the server that runs now: open the one that `metaloom serve` has printed.";
  });
</script>
""",
    headers={
        "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-store",
    },
)
_DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
_CLOSED = PlainTextResponse("not served: it would load scripts of other hosts\n", 404)


def guarded(prefect: ASGIApp, *, any_host: bool) -> ASGIApp:
    """Return Prefect's application behind the gate, with the page that opens it logged in.

    Prefect answers every page in the user's browser (`access-control-allow-origin: *`) and looks at no `Host`. The gate
    refuses what other pages ask for. Prefect refuses other users and programs, since it always has a password here.
    Its pages over its API at `/docs` are closed: they ask for no password, and load scripts of others on the origin
    that keeps the user's.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, app = scope.get("path", ""), prefect
        if scope["type"] == "http" and path == OPEN:
            app = _OPENING
        # The API's own documentation pages need the password.
        elif scope["type"] == "http" and path.endswith(_DOCS) and not path.startswith("/api/"):
            app = _CLOSED
        await app(scope, receive, send)

    return Gate(answer, partial(refusal_of_other_pages, any_host=any_host))


if __name__ == "__main__":
    main(*sys.argv[1:])
