"""`metaloom serve`: a Prefect server with its page, deployments and a worker.

Each part is a process. All parts get the same address and password. They are started in order and stopped together,
even if only one of them ends: flow runs continue when systemd, Docker or Kubernetes restarts `metaloom serve`. Anyone
with access to a Prefect server can run its deployments. Therefore, the server has a password and a gate against other
pages in the user's browser (server.py), and it accepts other machines only with a password that the user chose.
"""

import asyncio
import base64
import os
import re
import shlex
import signal
import socket
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import program
from metaloom.flows.prefect_app.home import (
    API,
    AUTH,
    DATABASE,
    ENVIRONMENT,
    HOST,
    OPEN,
    TEMPLATE,
    Address,
    folder_settings,
    folder_variables,
    is_same_api,
    make_home,
    unproxied,
    write,
    write_environment,
    write_settings,
)
from metaloom.flows.prefect_app.parts import Interrupted, ServeError, StopRequest, alone, say
from metaloom.flows.prefect_app.reports import VARIABLE, served_reports

ANSWER_SECONDS = 10
# URL schemes that PostgreSQL and SQLAlchemy use.
_SCHEMES = ("postgres", "postgresql", "postgresql+asyncpg")
PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"
PROFILES = Path(__file__).parent / "profiles.toml"


def server_url(named: str) -> str:
    """Return a PostgreSQL URL with the driver that Prefect needs; raise UsageError if the URL is malformed."""
    scheme, _, rest = named.partition("://")
    if scheme not in _SCHEMES or not re.search(r"^[^/]*/[^/?]+", rest):
        raise UsageError(
            f"--database: got {without_password(named)!r}; expected postgresql://USER@HOST:PORT/DATABASE. Without "
            "--database, Prefect uses a SQLite file in .prefect"
        )
    return f"postgresql+asyncpg://{rest}"


def without_password(url: str) -> str:
    """Return a URL without its password, even if the URL is malformed or the password contains an "@"."""
    before, at, after = url.rpartition("@")
    scheme, found, login = before.partition("://")
    user, secret, _ = login.partition(":")
    shown = f"{scheme}://{user}{':...' if secret else ''}" if found else "..." if at else ""
    return shown + at + re.sub(r"(?i)(pass\w*=)[^&]*", r"\1...", after)


def require_answer(url: str) -> None:
    """Raise UsageError if no connection to the database can be opened."""

    async def connect() -> None:
        import asyncpg

        await (await asyncpg.connect(url.replace("+asyncpg", "", 1), timeout=ANSWER_SECONDS)).close()

    try:
        asyncio.run(connect())
    except ValueError:  # the error's message may contain the password
        raise UsageError(
            f"--database: {without_password(url)} cannot be parsed; use postgresql://USER@HOST:PORT/DATABASE, and "
            'percent-encode special characters in a password, such as %2F for "/"'
        ) from None
    except Exception as error:  # driver and network errors have no common class
        raise UsageError(
            f"--database: {without_password(url)} cannot be used ({type(error).__name__}: {error}). It must "
            "exist and belong to the user; `createdb` creates one"
        ) from None


def serve(folder: Path, port: int, *, host: str = HOST, database: str | None = None, trust: bool = False) -> None:
    """Start all parts in a folder, where flows run, and stop them on Ctrl-C or SIGTERM.

    Ctrl-C cancels flow runs. After SIGTERM, as sent by systemd, Docker and Kubernetes, the next `metaloom serve`
    continues them.
    """
    address = Address(port, host)
    _require_password(address)
    url = None if database is None else server_url(database)
    stop = StopRequest()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop.heard)
    # The port is held from here on; without a listener, somebody else could take it and receive the password.
    with ExitStack() as sockets:
        listening = sockets.enter_context(_listening(address))
        reports = sockets.enter_context(_listening(Address(port + 1))) if address.is_private else None
        if url is not None:
            require_answer(url)
            os.environ[DATABASE] = url
        given = os.environ.get(PASSWORD)
        found = folder_settings(folder)
        home, own = make_home(folder, trust=trust)
        with suppress(Interrupted), alone(folder, home):
            ready = _prepare(folder, address, found, None if given else own)
            os.environ.update(settings(home, address, given or own))
            # Remove a Prefect Cloud key, which this server does not accept.
            os.environ.pop("PREFECT_API_KEY", None)
            # Passed to the worker and its flows through the environment. Reports are only for browsers on this machine.
            if reports is not None:
                os.environ[VARIABLE] = sockets.enter_context(served_reports(reports))
            # Prefect reads settings in its working directory, which may belong to somebody else.
            os.chdir("/")
            from metaloom.flows.prefect_app.flow_runs import serve_parts

            serve_parts(home, address, listening, stop, ready)
    say("stopped")


def settings(home: Path, address: Address, password: str) -> dict[str, str]:
    """Return the environment variables of all parts; other Prefect settings are in profiles.toml."""
    # Paths must be absolute: only flow processes enter the folder, since Prefect would read settings there.
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        **unproxied(os.environ, address.api),
        # The server, workers and flows share one password.
        PASSWORD: password,
        AUTH: password,
        API: address.api,
        "PREFECT_HOME": str(home),
        # Rewritten at every start, because Prefect reads this file, and such a file can call any code.
        "PREFECT_LOGGING_SETTINGS_PATH": str(write_settings(home)),
        "PREFECT_PROFILES_PATH": str(PROFILES),
        "PREFECT_PROFILE": "metaloom",
        "DO_NOT_TRACK": "1",
        # The bare-name plugin is for users' commands; workers may import Prefect where it cannot be loaded.
        "PREFECT_PLUGINS_ENABLED": "false",
    }


def _require_password(address: Address) -> None:
    chosen = os.environ.get(PASSWORD, "")
    if not chosen.isascii():
        raise UsageError(f"{PASSWORD} contains non-ASCII characters, which Prefect's page cannot send")
    user, _, password = chosen.partition(":")
    if not address.is_private and not (user and password):
        raise UsageError(
            f"--host {address.host}: other machines could start deployments on your behalf. Set a password first with "
            f"`export {PASSWORD}=USER:PASSWORD`, and set PREFECT_API_AUTH_STRING to the same value wherever you run "
            "`prefect`"
        )


def _listening(address: Address) -> socket.socket:
    """Return a socket that listens on an address; raise ServeError if the port cannot be used."""
    port = address.port
    try:
        # It ignores lingering connections to an earlier server.
        return socket.create_server((address.host, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise ServeError(
            f"port {port} cannot be used: {error.strerror}. If another Prefect server runs there, stop it, or "
            f"use another port: metaloom serve --port {4300 if port in (4200, 4201) else port + 2}"
        ) from None


def _prepare(folder: Path, address: Address, found: Mapping[str, Any], password: str | None) -> str:
    """Write the settings with which `prefect` commands find the server; return the message to show once it runs."""
    # Environment variables take precedence over files, and are probably set in other shells, too.
    variables = folder_variables(folder)
    exported = {**variables, **os.environ}.get(API, address.api)
    write_environment(folder, address.api, password)
    if not found and not (folder / TEMPLATE.name).exists():
        text = TEMPLATE.read_text("utf-8").replace(Address(4200).api, address.api)
        write(folder / TEMPLATE.name, text)
        say("wrote prefect.toml, so that `prefect` commands in this folder find the server")
        found = tomllib.loads(text)
    plugins = found.get("plugins", {})
    has_plugin = plugins.get("enabled") is True and "metaloom" in plugins.get("allow", ["metaloom"])
    finds_it = has_plugin and is_same_api(found.get("api", {}).get("url"), address.api)
    environment = f". {shlex.quote(str(folder / ENVIRONMENT))}"
    here = "" if finds_it and is_same_api(exported, address.api) else f"first            {environment}\n"
    name = "meta-train" if has_plugin else "meta-train/meta-train"
    if password is None:
        here += f"its password     export {AUTH}=USER:PASSWORD, wherever `prefect` is typed\n"
    opened = "" if password is None else f"{OPEN}#{base64.b64encode(password.encode()).decode()}"
    reports = f"http://{HOST}:{address.port + 1}" if address.is_private else "not served; they are beside the runs"
    ignored = [key for key in found if key not in ("api", "plugins")]
    ignored += [name for name in variables if name.startswith("PREFECT_") and name not in (API, AUTH)]
    if ignored:
        here += f"ignored          {', '.join(ignored)} in Prefect's settings here; use environment variables\n"
    return f"""
Prefect's page   {address.page}{opened}
reports          {reports}
{here}start a run      {program("prefect")} deployment run {name} -p recipe=first-steps
other folders    {environment}; name it meta-train/meta-train there
stop             Ctrl-C
"""
