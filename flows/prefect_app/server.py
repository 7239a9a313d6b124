"""The command `prefect` with two faults of its server under SQLite mended; `metaloom serve` starts its server by it.

- Transactions take their lock when they begin, and wait for it. Prefect 3.8 takes it at the first write, which fails at
  once with "database is locked" when another transaction has written since this one has read.
- A batch of events that are all stored already, as clients send after they have lost the server, is no error. Prefect
  3.8 inserts nothing, which SQLite refuses, and drops new events with it.

Both lean on Prefect's private modules; tests/flows/test_prefect_server.py and test_prefect_databases.py run them in a
real server.
"""

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect.server.events.schemas.events import ReceivedEvent
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def lock_at_once() -> None:
    """Have every transaction of SQLite take its lock when it begins."""
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_immediately(
        self: AioSqliteConfiguration, session: "AsyncSession", with_for_update: bool = False
    ) -> "AsyncIterator[AsyncSessionTransaction]":
        del with_for_update
        async with begin(self, session, with_for_update=True) as transaction:
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_immediately


def skip_stored_events() -> None:
    """Have SQLite take batches of events that are stored already."""
    import sqlalchemy
    from prefect.server.database import provide_database_interface
    from prefect.server.events.storage import database
    from sqlalchemy.exc import SADeprecationWarning

    module: Any = database
    write = module._write_sqlite_events

    async def write_new(session: "AsyncSession", events: "list[ReceivedEvent]") -> None:
        event = provide_database_interface().Event
        with warnings.catch_warnings():  # of the kind of column that Prefect made for SQLAlchemy
            warnings.simplefilter("ignore", SADeprecationWarning)
            asked = sqlalchemy.select(event.id).where(event.id.in_([event.id for event in events]))
        stored = {*(await session.scalars(asked)).all()}
        if new := [event for event in events if event.id not in stored]:
            await write(session=session, events=new)

    module._write_sqlite_events = write_new


def main() -> None:
    """Run the command."""
    from prefect.cli import app

    lock_at_once()
    skip_stored_events()
    app()


if __name__ == "__main__":
    main()
