"""Files in the folder `.prefect`, which `metaloom serve` keeps for itself and for `prefect` commands.

`metaloom serve` ignores Prefect's settings in the folder (`prefect.toml`, `pyproject.toml`, `.env`), which can name
programs to run and may belong to somebody else. It only checks that commands typed there find its server.
"""

import hashlib
import logging
import os
import secrets
import shlex
import stat
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from metaloom.flows.errors import UsageError
from metaloom.flows.prefect_app.parts import ServeError

log: logging.Logger = logging.getLogger(__name__)

API, AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"
ENVIRONMENT = Path(".prefect") / "environment"
"""File with the server's address for shells to source; plugin.py reads it for `prefect` commands in the folder."""
OPEN = "/open"  # path of the login page. The password follows `#` in its URL, so it is never sent or logged.
LOOPBACK = ("127.0.0.1", "localhost")
HOST, EVERYWHERE = LOOPBACK[0], "0.0.0.0"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
TEMPLATE = Path(__file__).parent / "prefect.toml"
# Exceptions raised in a flow run that was cancelled or whose `serve` was stopped; Prefect treats them as unexpected.
ENDED = ("CancelledRun", "TerminationSignal")
# Start of the message if `serve` ends a flow run while training's signal handler is not installed.
ABORTED = "Crash detected! Execution was aborted by a termination signal"


@dataclass(frozen=True)
class Address:
    """Address on which the server listens."""

    port: int
    host: str = HOST

    @property
    def is_private(self) -> bool:
        """True if the address can be reached only from this machine."""
        return self.host in LOOPBACK

    @property
    def page(self) -> str:
        """URL of the page, as reached from this machine."""
        # Not `localhost`, which may also be ::1, where somebody else can listen.
        return f"http://{HOST if self.is_private or self.host == EVERYWHERE else self.host}:{self.port}"

    @property
    def api(self) -> str:
        """URL of the API, as reached from this machine."""
        return f"{self.page}/api"


def make_home(folder: Path, *, trust: bool) -> tuple[Path, str]:
    """Create the folder for the server's files in `folder`; return its path and the password.

    With `trust`, existing files are used, unless others own or can write to `.prefect`.
    """
    home = folder / ENVIRONMENT.parent
    try:
        if not trust:
            _require_kept(folder)
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
        _require_own(home)
        return home, _password(home, trust=trust)
    except OSError as error:
        raise ServeError(f"{folder} cannot be used ({error}); start `metaloom serve` in your own folder") from None


def _require_kept(folder: Path) -> None:
    """Raise UsageError if another user can replace `.prefect`."""
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    is_shared = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_gid != os.getegid())
    if found.st_uid not in (0, os.geteuid()):
        fault = f"belongs to the user {found.st_uid}"
    elif is_shared and not mode & stat.S_ISVTX:
        fault = f"can be written by others (mode {mode:04o})"
    else:
        return
    raise UsageError(
        f"{folder} {fault}, who can put a .prefect there that runs programs under your account. Start "
        "`metaloom serve` in a folder that only you can write to, or add --trust if you trust them"
    )


def _require_own(home: Path) -> None:
    """Make a folder private. Raise UsageError if it is not a folder, or not this user's, or writable by everyone."""
    found = home.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        fault = "is a link" if stat.S_ISLNK(found.st_mode) else "is a file"
    elif found.st_uid != os.geteuid():
        fault = f"belongs to the user {found.st_uid}"
    elif mode & stat.S_IWOTH:
        fault = f"can be written by everyone (mode {mode:04o})"
    else:
        home.chmod(0o700)
        return
    raise UsageError(
        f"{home} {fault}. You must own it and be the only one who can write to it, since its contents can run "
        "programs as you. Remove it, or start `metaloom serve` in another folder"
    )


def _password(home: Path, *, trust: bool) -> str:
    from metaloom.flows.trust import remember, remembered

    file, password = home / "password", ""
    with suppress(ValueError):
        password = file.read_text("utf-8") if file.is_file() and not file.is_symlink() else ""
    if not password or remembered(_hash(password)) is None:
        if (home / "prefect.db").exists() and not trust:
            raise UsageError(
                f"{home} has a database that was made by an earlier version, or by somebody else. Its deployments "
                "can run programs under your account. If you trust it, add --trust; otherwise delete that folder"
            )
        password = f"metaloom:{secrets.token_urlsafe(24)}"
        write(file, password)
        try:
            remember(_hash(password), str(home), {})
        except OSError as error:
            log.warning("cannot record that you trust %s (%s): the next start needs --trust", home, error)
    write(home / ".gitignore", "*\n")
    return password


def write_environment(folder: Path, api: str, password: str | None) -> None:
    """Write the file from which shells read the server's address and, if given, the password."""
    values = {API: api, **({AUTH: password} if password else {}), **unproxied(os.environ, api)}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write(folder / ENVIRONMENT, "".join(lines))


def read_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for reaching the folder's server; empty if none was started."""
    with suppress(OSError, ValueError):
        file = folder / ENVIRONMENT
        words = shlex.split(file.read_text("utf-8")) if file.is_file() else []
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def unproxied(environment: Mapping[str, str], api: str) -> dict[str, str]:
    """Return environment variables that exclude the server from proxying."""
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, before.split(",")), *LOOPBACK, urlsplit(api).hostname or LOOPBACK[0]])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def is_same_api(one: str | None, other: str | None) -> bool:
    """Return True if two URLs refer to the same server; `localhost` and 127.0.0.1 count as the same host."""
    one, other = (f"{url or ''}/".replace("://localhost:", "://127.0.0.1:").rstrip("/") for url in (one, other))
    return one == other


def folder_settings(folder: Path) -> dict[str, Any]:
    """Return the Prefect settings in a folder's files; prefect.toml takes precedence."""
    found: dict[str, Any] = {}
    for name, path in (("pyproject.toml", ("tool", "prefect")), (TEMPLATE.name, ())):
        file = folder / name
        try:
            table = tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise ServeError(f"{file} cannot be read as TOML, and `prefect` takes settings from it: {error}") from None
        for key in path:
            table = table.get(key, {})
        found |= table
    return {key: value for key, value in found.items() if isinstance(value, dict)}


def folder_variables(folder: Path) -> dict[str, str | None]:
    """Return the variables in the folder's `.env`, which `prefect` commands use."""
    from dotenv import dotenv_values

    file = folder / ".env"
    with suppress(OSError, ValueError):
        return dotenv_values(file) if file.is_file() else {}
    return {}


def write(file: Path, text: str) -> None:
    """Write a file that only this user can read. A link at the path is replaced, not followed."""
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    part.replace(file)


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


class WithoutFalseAlarms(logging.Filter):
    """Log filter that drops Prefect's error messages about flow runs that were cancelled or stopped on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return not (record.getMessage().startswith(ABORTED) or (kind is not None and kind.__name__ in ENDED))


def write_settings(home: Path) -> Path:
    """Write Prefect's logging settings with the filter added, and return the path of the file."""
    import yaml

    # find_spec does not import Prefect, which would read the folder's settings files.
    prefect = find_spec("prefect")
    assert prefect is not None
    assert prefect.origin is not None
    own = Path(prefect.origin).parent / "logging" / "logging.yml"
    settings: dict[str, Any] = yaml.safe_load(own.read_text("utf-8"))
    settings["filters"] = {"false_alarms": {"()": f"{__name__}.{WithoutFalseAlarms.__name__}"}}
    for handler in settings["handlers"].values():
        handler["filters"] = ["false_alarms"]
    file = home / "logging.yml"
    write(file, yaml.safe_dump(settings))
    return file
