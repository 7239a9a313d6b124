"""`metaloom serve`: a Prefect server with its page, the deployments and a worker, for as long as it runs.

Each part is a Prefect command that could be typed by hand (docs/prefect.md lists them), started here in the right
order, told the same address, started again if it ends, and stopped together. Whoever reaches a Prefect server can run
what it deploys, so it listens on the loopback interface, and on any other only with a password.
"""

import os
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener

from metaloom.flows.errors import UsageError
from metaloom.flows.prefect_app.database import require_answer, server_url
from metaloom.flows.prefect_app.flow_runs import (
    POOL,
    Caretaker,
    cancel_all,
    go_on_with_left_over,
    leave_all,
    limit_trainings,
)
from metaloom.flows.prefect_app.parts import START_SECONDS, Part, ServeError, Stop, alone, running
from metaloom.flows.prefect_app.quiet import write_settings
from metaloom.flows.prefect_app.reports import VARIABLE, served_reports
from metaloom.flows.views.formatting import program

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

HOST, EVERYWHERE = "127.0.0.1", "0.0.0.0"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"
HERE = Path(__file__).parent
LOOK_SECONDS = 1.0
# Longer than the 30 s that Prefect leaves a cancelled flow run to end by itself.
CANCEL_SECONDS = 40.0


class Interrupted(Exception):
    """Ctrl-C came while the parts were being started."""


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    port: int
    host: str = HOST

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in (HOST, "localhost")

    @property
    def page(self) -> str:
        """Address of the page, as this machine reaches it."""
        return f"http://{HOST if self.host == EVERYWHERE else self.host}:{self.port}"

    @property
    def api(self) -> str:
        """Address of the API, as this machine reaches it."""
        return f"{self.page}/api"


def serve(folder: Path, port: int, *, host: str = HOST, database: str | None = None) -> None:
    """Start everything in a folder, where flows will run, and stop everything on Ctrl-C or SIGTERM.

    Ctrl-C cancels flow runs in progress. After SIGTERM, which systemd, Docker and Kubernetes send, the next one goes on
    with them.

    Args:
        folder: the folder.
        port: of the server and its page; that of reports is the next one.
        host: address that the server listens on.
        database: URL of a PostgreSQL database for Prefect; a SQLite file in the folder when None.

    Raises:
        UsageError: the server would be open to other machines without a password, or the database cannot be used.
        ServeError: the port is taken, the folder cannot be used, or a part did not start.
    """
    address = Address(port, host)
    _require_password(address)
    url = None if database is None else server_url(database)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop.heard)
    _require_free(address)
    if address.is_private:
        _require_free(Address(port + 1))  # of reports
    if url is not None:
        require_answer(url)
        os.environ[DATABASE] = url
    home = _prepare(folder, address)
    with suppress(Interrupted), alone(folder, home):
        _serve(folder, home, address, stop)
    _say("stopped")


def settings(home: Path, address: Address) -> dict[str, str]:
    """Environment variables for every part; the rest of Prefect's settings are in profiles.toml."""
    password = os.environ.get(PASSWORD)
    return {
        # What the server asks for is what workers and flows say.
        **({"PREFECT_API_AUTH_STRING": password} if password else {}),
        "PREFECT_API_URL": address.api,
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(HERE / "profiles.toml"),
        "PREFECT_PROFILE": "metaloom",
        "DO_NOT_TRACK": "1",
        # The bare-name plugin is for what users type; a worker sometimes imports Prefect where none can be loaded.
        "PREFECT_PLUGINS_ENABLED": "false",
    }


def _prepare(folder: Path, address: Address) -> Path:
    """Make the folder of the server's own files, and tell Prefect's commands in this folder about the server."""
    home = folder / ".prefect"
    try:
        home.mkdir(exist_ok=True)
        if not _folder_settings(folder) and not (folder / "prefect.toml").exists():
            text = (HERE / "prefect.toml").read_text("utf-8").replace(Address(4200).api, address.api)
            (folder / "prefect.toml").write_text(text, "utf-8")
            _say("wrote prefect.toml, by which `prefect` commands in this folder find the server")
    except (OSError, ValueError) as error:
        raise ServeError(f"{folder} cannot be served from ({error}); start it in a folder of your own") from None
    return home


def _folder_settings(folder: Path) -> dict[str, Any]:
    """Prefect's settings in a folder, of which those in prefect.toml win."""
    found: dict[str, Any] = {}
    for name, path in (("pyproject.toml", ("tool", "prefect")), ("prefect.toml", ())):
        file = folder / name
        table = tomllib.loads(file.read_text("utf-8")) if file.exists() else {}
        for key in path:
            table = table.get(key, {})
        found |= table
    return found


def _serve(folder: Path, home: Path, address: Address, stop: Stop) -> None:
    # Before this process imports Prefect, which reads them then.
    os.environ.update(settings(home, address))
    with ExitStack() as stack:
        # The worker and its flows learn of it through the environment. Reports are for browsers of this machine.
        if address.is_private:
            os.environ[VARIABLE] = stack.enter_context(served_reports(HOST, address.port + 1))
        _say("starting the Prefect server ...")
        command = [
            "metaloom.flows.prefect_app.server",
            "server",
            "start",
            "--host",
            address.host,
            "--port",
            str(address.port),
        ]
        server = Part("the Prefect server", command, home / "server.log", answers=lambda: _answers(address))
        stack.enter_context(running(server))
        _wait(stop, [server], lambda: _answers(address))
        _say("deploying the flows ...")
        os.environ["PREFECT_LOGGING_SETTINGS_PATH"] = str(write_settings(home))
        caretaker = Caretaker(address.api, _tell)
        with _client() as client:
            go_on_with_left_over(client, address.api, _tell)
        for what, command in (
            ("prefect work-pool create", ["work-pool", "create", POOL, "--type", "process", "--overwrite"]),
            ("prefect deploy", ["--no-prompt", "deploy", "--all", "--prefect-file", str(HERE / "prefect.yaml")]),
        ):
            with running(Part(what, ["prefect", *command], home / "deploy.log")) as step:
                _wait(stop, [server, step], lambda step=step: step.code == 0)
        with _client() as client:
            limit_trainings(client)
        command = ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "metaloom"]
        worker = stack.enter_context(running(Part("the worker", command, ended=caretaker.worker_lost)))
        stack.callback(_end_runs, stop, worker, address.api)
        _say(_ready(address, _folder_settings(folder)))
        _keep_running(stop, server, worker, caretaker)
        what = "can be resumed" if stop.for_good else "goes on when `metaloom serve` is started again"
        _say(f"\nstopping; a run that is being trained keeps every stage it has stored, and {what} ...")


def _keep_running(stop: Event, server: Part, worker: Part, caretaker: Caretaker) -> None:
    """Start again what ends, and have flow runs go on that lose their process, until Ctrl-C."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    while not stop.wait(LOOK_SECONDS):
        works = server.revive(_tell)
        worker.revive(_tell)
        if not works:
            continue
        # A server that went away in between, or was too busy, is asked again in a moment.
        with suppress(HTTPError, PrefectException), _client() as client:
            caretaker.look(client)


def _wait(stop: Event, parts: list[Part], until: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Return when the condition holds.

    Raises:
        ServeError: one of the parts ended first, or the time is up.
        Interrupted: Ctrl-C was pressed.
    """
    deadline = time.monotonic() + seconds
    while not until():
        for part in parts:
            if part.code is not None:
                raise part.explain(f"ended with code {part.code}")
        if time.monotonic() > deadline:
            raise parts[-1].explain(f"is not ready after {seconds:.0f} s")
        if stop.wait(0.2):
            raise Interrupted


def _require_password(address: Address) -> None:
    user, _, password = os.environ.get(PASSWORD, "").partition(":")
    if not address.is_private and not (user and password):
        raise UsageError(
            f"--host {address.host}: other machines could start deployments as you; required a password: `export "
            f"{PASSWORD}=USER:PASSWORD` first, and the same as PREFECT_API_AUTH_STRING wherever `prefect` is typed"
        )


def _require_free(address: Address) -> None:
    port = address.port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, port))
        except OSError as error:
            raise ServeError(
                f"port {port} of {address.host} cannot be used ({error}). If another Prefect server runs there, stop "
                f"it; or take another port: metaloom serve --port {4300 if port in (4200, 4201) else port + 2}"
            ) from None


def _answers(address: Address) -> bool:
    # Without the proxy that the environment may name: it cannot reach this machine's loopback interface.
    try:
        with build_opener(ProxyHandler({})).open(f"{address.api}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _client() -> "SyncPrefectClient":
    from prefect import get_client

    return get_client(sync_client=True)


def _end_runs(stop: Stop, worker: Part, api: str) -> None:
    from httpx import HTTPError

    # If the server is what went away, nobody is left to ask.
    with suppress(HTTPError), _client() as client:
        if stop.for_good:
            cancel_all(client, CANCEL_SECONDS)
        else:
            leave_all(client, api, worker.stop)


def _ready(address: Address, found: dict[str, Any]) -> str:
    elsewhere = f"export PREFECT_API_URL={address.api}"
    here = "" if found.get("api", {}).get("url") == address.api else f"\nfirst, in that shell: {elsewhere}"
    if not address.is_private:
        here += "\nits password     export PREFECT_API_AUTH_STRING=USER:PASSWORD, wherever `prefect` is typed"
    name = "meta-train" if found.get("plugins", {}).get("enabled") else "meta-train/meta-train"
    reports = f"http://{HOST}:{address.port + 1}" if address.is_private else "not served; they are beside the runs"
    return f"""
Prefect's page   {address.page}
reports          {reports}
start a run      {program("prefect")} deployment run {name} -p recipe=first-steps{here}
other folders    {elsewhere}; name it meta-train/meta-train there
stop             Ctrl-C
"""


def _tell(words: str) -> None:
    """Say what happened while nobody looked."""
    _say(f"{datetime.now():%Y-%m-%d %H:%M:%S} | metaloom serve: {words}")


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
