"""Prefect's server behind a gate, as `metaloom serve` starts it: `python -P -m metaloom.flows.prefect_app.server`.

It works around two bugs in Prefect's server with SQLite:

- Transactions acquire their lock when they begin. Prefect 3.8 acquires the lock at the first write, which fails
immediately with "database is locked" if another transaction has written since this one read.

- A batch in which all events are already stored, as sent by a reconnected client, is accepted. Prefect 3.8 inserts
nothing, which SQLite rejects, and drops new events.

Both workarounds use Prefect's private modules; tests/flows/test_prefect_server.py and test_prefect_databases.py run
them in a real server.
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
from metaloom.flows.viewer.gate import HOSTS, Gate, refusal_of_other_pages


def lock_at_once() -> None:
    """Patch Prefect so that SQLite write transactions acquire their lock when they begin."""
    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_immediately(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        async with begin(self, session, with_for_update=True) as transaction:
            await session.connection()  # begins the transaction
            # Nested transactions must not lock: a request that reads through another session would wait for itself.
            mode = SQLITE_BEGIN_MODE.set(None)
            try:
                yield transaction
            finally:
                SQLITE_BEGIN_MODE.reset(mode)

    AioSqliteConfiguration.begin_transaction = begin_immediately


def skip_stored_events() -> None:
    """Patch Prefect so that its SQLite event storage accepts batches of events that are already stored."""
    module: Any = database
    write = module._write_sqlite_events

    async def write_new(session: AsyncSession, events: list[ReceivedEvent]) -> None:
        event = provide_database_interface().Event
        with warnings.catch_warnings():  # caused by Prefect's column type
            warnings.simplefilter("ignore", SADeprecationWarning)
            asked = sqlalchemy.select(event.id).where(event.id.in_([event.id for event in events]))
        stored = {*(await session.scalars(asked)).all()}
        if new := [event for event in events if event.id not in stored]:
            await write(session=session, events=new)

    module._write_sqlite_events = write_new


def main(host: str, listening: str) -> None:
    """Serve Prefect's API and page until SIGTERM.

    `listening` is the file descriptor of the socket. `metaloom serve` keeps it open, so that no other user can take the
    port and receive the password.
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
      "This is not the address of the running server. Open the address that `metaloom serve` printed.";
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
_CLOSED = PlainTextResponse("not served, because it would load third-party scripts\n", 404)


def guarded(prefect: ASGIApp, *, any_host: bool) -> ASGIApp:
    """Wrap Prefect's application in the request gate, and add the login page.

    Prefect accepts requests from any page in the user's browser (`access-control-allow-origin: *`) and ignores `Host`;
    the gate rejects requests from other pages. Other users and programs need the password. `/docs` is disabled,
    because it needs no password and loads third-party scripts in the origin that stores the user's password.
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
