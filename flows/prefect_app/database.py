"""Prefect's database where it is not the SQLite file of `metaloom serve`: how a user names it, whether it answers."""

import asyncio
import re

from metaloom.flows.errors import UsageError

ANSWER_SECONDS = 10
# As PostgreSQL and as SQLAlchemy spell it.
_SCHEMES = ("postgres", "postgresql", "postgresql+asyncpg")


def server_url(named: str) -> str:
    """Return the URL of a database as Prefect takes it, with the driver that Prefect brings."""
    scheme, _, rest = named.partition("://")
    if scheme not in _SCHEMES or not re.search(r"^[^/]*/[^/?]+", rest):
        raise UsageError(
            f"--database: found {without_password(named)!r}; required postgresql://USER@HOST:PORT/DATABASE. Without "
            "--database it is a SQLite file in .prefect"
        )
    return f"postgresql+asyncpg://{rest}"


def without_password(url: str) -> str:
    """Return a URL that may be shown, also one with a slip of the pen or with an "@" in its password."""
    before, at, after = url.rpartition("@")
    scheme, found, login = before.partition("://")
    user, secret, _ = login.partition(":")
    shown = f"{scheme}://{user}{':...' if secret else ''}" if found else "..." if at else ""
    return shown + at + re.sub(r"(?i)(pass\w*=)[^&]*", r"\1...", after)


def require_answer(url: str) -> None:
    """Refuse a database that refuses connections, before anything is started."""
    try:
        asyncio.run(_connect(url.replace("+asyncpg", "", 1)))
    except ValueError:  # whose words may be part of the password
        raise UsageError(
            f"--database: {without_password(url)} cannot be read; required postgresql://USER@HOST:PORT/DATABASE, and "
            'in a password %XX for whatever is no letter or digit, such as %2F for "/"'
        ) from None
    except Exception as error:  # neither drivers' errors nor network errors have a common class
        raise UsageError(
            f"--database: {without_password(url)} cannot be used ({type(error).__name__}: {error}); required a "
            "database that exists and whose owner the user is. `createdb` makes one"
        ) from None


async def _connect(url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=ANSWER_SECONDS)
    await connection.close()
