"""`metaloom serve`: a Prefect server with its page, deployments and a worker.

Each part is a process with the same address and password. Parts are started in order, restarted if they end, and
stopped together. Anyone with access to a Prefect server can run its deployments, so it has a password and a gate
against other pages in the user's browser (server.py), and listens beyond this machine only with a user-defined
password.
"""

import asyncio
import base64
import os
import re
import select
import shlex
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import program
from metaloom.flows.prefect_app import late
from metaloom.flows.prefect_app.flow_runs import (
    POOL,
    STAGE_SECONDS,
    Caretaker,
    cancel_all,
    end_processes,
    flow_processes,
    go_on_with_left_over,
    leave_all,
    runs_of,
)
from metaloom.flows.prefect_app.home import (
    API,
    AUTH,
    ENVIRONMENT,
    LOOPBACK,
    OPEN,
    TEMPLATE,
    folder_settings,
    folder_variables,
    is_same_api,
    make_home,
    unproxied,
    write,
    write_environment,
    write_settings,
)
from metaloom.flows.prefect_app.parts import START_SECONDS, Part, ServeError, Stop, alone, running
from metaloom.flows.prefect_app.reports import VARIABLE, served_reports
from metaloom.storage import argument

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

ANSWER_SECONDS = 10
# Spellings of PostgreSQL and SQLAlchemy.
_SCHEMES = ("postgres", "postgresql", "postgresql+asyncpg")


def server_url(named: str) -> str:
    """Return a database URL for Prefect, with its driver."""
    scheme, _, rest = named.partition("://")
    if scheme not in _SCHEMES or not re.search(r"^[^/]*/[^/?]+", rest):
        raise UsageError(
            f"--database: found {without_password(named)!r}; required postgresql://USER@HOST:PORT/DATABASE. Without "
            "--database it is a SQLite file in .prefect"
        )
    return f"postgresql+asyncpg://{rest}"


def without_password(url: str) -> str:
    """Return a URL without its password, even if it is malformed or has an "@" in the password."""
    before, at, after = url.rpartition("@")
    scheme, found, login = before.partition("://")
    user, secret, _ = login.partition(":")
    shown = f"{scheme}://{user}{':...' if secret else ''}" if found else "..." if at else ""
    return shown + at + re.sub(r"(?i)(pass\w*=)[^&]*", r"\1...", after)


def require_answer(url: str) -> None:
    """Reject a database that refuses connections, before starting anything."""
    try:
        asyncio.run(_connect(url.replace("+asyncpg", "", 1)))
    except ValueError:  # its message may contain the password
        raise UsageError(
            f"--database: {without_password(url)} cannot be read; required postgresql://USER@HOST:PORT/DATABASE, and "
            'in a password %XX for whatever is no letter or digit, such as %2F for "/"'
        ) from None
    except Exception as error:  # errors of drivers and network have no common class
        raise UsageError(
            f"--database: {without_password(url)} cannot be used ({type(error).__name__}: {error}); required a "
            "database that exists and whose owner the user is. `createdb` makes one"
        ) from None


async def _connect(url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=ANSWER_SECONDS)
    await connection.close()


HOST, EVERYWHERE = LOOPBACK[0], "0.0.0.0"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"
PROFILES = Path(__file__).parent / "profiles.toml"
LOOK_SECONDS = 1.0
# Longer than the 30 s in which Prefect lets a cancelled flow run end.
CANCEL_SECONDS = 40.0


class Interrupted(Exception):
    """Raised for Ctrl-C while parts are starting."""


@dataclass(frozen=True)
class Address:
    """Address at which the server listens."""

    port: int
    host: str = HOST

    @property
    def is_private(self) -> bool:
        """True if the address is only reachable from this machine."""
        return self.host in LOOPBACK

    @property
    def page(self) -> str:
        """URL of the page from this machine."""
        # Not `localhost`, which may also be ::1, where somebody else can listen.
        return f"http://{HOST if self.is_private or self.host == EVERYWHERE else self.host}:{self.port}"

    @property
    def api(self) -> str:
        """URL of the API from this machine."""
        return f"{self.page}/api"


def serve(folder: Path, port: int, *, host: str = HOST, database: str | None = None, trust: bool = False) -> None:
    """Start all parts in a folder, where flows run, and stop them on Ctrl-C or SIGTERM.

    Ctrl-C cancels flow runs. After SIGTERM, as sent by systemd, Docker and Kubernetes, the next `metaloom serve`
    continues them.
    """
    address = Address(port, host)
    _require_password(address)
    url = None if database is None else server_url(database)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop.heard)
    # Hold both all the time, including restarts of the server.
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
            # The key of Prefect Cloud, which this server does not accept.
            os.environ.pop("PREFECT_API_KEY", None)
            _serve(home, address, listening, reports, stop, ready)
    _say("stopped")


def settings(home: Path, address: Address, password: str) -> dict[str, str]:
    """Return environment variables for all parts; other Prefect settings are in profiles.toml."""
    # Flow processes enter the folder, parts do not: Prefect would read settings there.
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        **unproxied(os.environ, address.api),
        # The server's password is also that of workers and flows.
        PASSWORD: password,
        AUTH: password,
        API: address.api,
        "PREFECT_HOME": str(home),
        # Written at every start, since Prefect reads this path and such a file can call any code.
        "PREFECT_LOGGING_SETTINGS_PATH": str(write_settings(home)),
        "PREFECT_PROFILES_PATH": str(PROFILES),
        "PREFECT_PROFILE": "metaloom",
        "DO_NOT_TRACK": "1",
        # The bare-name plugin is for users' commands; workers may import Prefect where it cannot be loaded.
        "PREFECT_PLUGINS_ENABLED": "false",
    }


def _serve(
    home: Path, address: Address, listening: socket.socket, reports: socket.socket | None, stop: Stop, ready: str
) -> None:
    with ExitStack() as stack:
        # Passed to the worker and its flows through the environment. Reports are only for browsers on this machine.
        if reports is not None:
            os.environ[VARIABLE] = stack.enter_context(served_reports(reports))
        # Prefect reads settings in its working folder, which may be somebody else's.
        os.chdir("/")
        _say("starting the Prefect server ...")
        number = listening.fileno()
        command = ["metaloom.flows.prefect_app.server", address.host, str(number)]
        answers = partial(_answers, address)
        server = Part("the Prefect server", command, home / "server.log", answers, inherits=(number,))
        stack.enter_context(running(server))
        stack.enter_context(_refusing(listening, server))
        _wait(stop, server)
        _say("deploying the flows ...")
        caretaker = Caretaker(home, _tell)
        _go_on(server, home)
        with running(Part("the deployment of the flows", ["metaloom.flows.prefect_app.deploy"])) as step:
            _wait(stop, server, step)
        command = ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "metaloom"]
        worker = stack.enter_context(running(Part("the worker", command, ended=caretaker.worker_lost)))
        stack.callback(_end_runs, stop, server, worker, home)
        _say(ready)
        _keep_running(stop, server, worker, caretaker, home)
        what = "can be resumed" if stop.for_good else "continues when `metaloom serve` is started again"
        _say(f"\nstopping; a run that is being trained keeps every stage it has stored, and {what} ...")


def _go_on(server: Part, home: Path) -> None:
    """Restart left-over flow runs."""
    try:
        with _client() as client:
            go_on_with_left_over(client, home, _tell)
    # Prefect's client raises RuntimeError for an unreachable server, ValueError for an invalid response.
    except (late.HTTPError, late.PrefectException, RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise server.explain(f"does not say which flow runs were left over ({told})") from None


def _keep_running(stop: Event, server: Part, worker: Part, caretaker: Caretaker, home: Path) -> None:
    """Restart ended parts and flow runs that lost their process, until Ctrl-C."""
    # Prefect's client retries for a minute, in which a dead server would not be restarted.
    at_once: dict[Any, Any] = {late.PREFECT_CLIENT_MAX_RETRIES: 0}
    database = home / "prefect.db"
    opened = _identity(database)
    while not stop.wait(LOOK_SECONDS):
        if _identity(database) != opened:
            runs = runs_of(flow_processes(home).values())
            go_on = "".join(f"\ncontinue with: metaloom resume {argument(run)}" for run in runs)
            raise ServeError(
                f"{database} was removed, and with it flow runs, schedules and what was set on the page. Stored runs "
                f"are whole; start `metaloom serve` again{go_on}"
            )
        works = server.revive(_tell)
        worker.revive(_tell)
        if not works:
            continue
        # If the server ended meanwhile or was too busy, retry shortly.
        with suppress(late.HTTPError, late.PrefectException), late.temporary_settings(at_once), _client() as client:
            caretaker.look(client)


def _identity(database: Path) -> tuple[int, int] | None:
    """Return device and inode of the SQLite file; None without one."""
    if DATABASE not in os.environ:
        with suppress(OSError):
            found = database.stat()
            return found.st_dev, found.st_ino
    return None


def _wait(stop: Event, server: Part, step: Part | None = None, seconds: float = START_SECONDS) -> None:
    """Wait until a step's process ends or, without a step, until the server responds."""
    deadline = time.monotonic() + seconds
    while True:
        # Check before sending the password.
        if server.code is not None:
            raise server.explain(f"ended with code {server.code}")
        if step is not None and step.code:
            raise step.explain(f"ended with code {step.code}")
        if server.answers() if step is None else step.code == 0:
            return
        if time.monotonic() > deadline:
            raise (step or server).explain(f"is not ready after {seconds:.0f} s")
        if stop.wait(0.2):
            raise Interrupted


def _require_password(address: Address) -> None:
    chosen = os.environ.get(PASSWORD, "")
    if not chosen.isascii():
        raise UsageError(f"{PASSWORD} has characters outside ASCII, which Prefect's page cannot send")
    user, _, password = chosen.partition(":")
    if not address.is_private and not (user and password):
        raise UsageError(
            f"--host {address.host}: other machines could start deployments as you; required a password: `export "
            f"{PASSWORD}=USER:PASSWORD` first, and the same as PREFECT_API_AUTH_STRING wherever `prefect` is typed"
        )


def _listening(address: Address) -> socket.socket:
    """Return a listening socket, which keeps the port."""
    port, listening = address.port, socket.socket()
    try:
        # Ignore remains of connections to an earlier server.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, port))
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        raise ServeError(
            f"port {port} of {address.host} cannot be used ({error}). If another Prefect server runs there, stop "
            f"it; or take another port: metaloom serve --port {4300 if port in (4200, 4201) else port + 2}"
        ) from None
    return listening


@contextmanager
def _refusing(listening: socket.socket, server: Part) -> Iterator[None]:
    """Close connections immediately while the server is down, so that clients do not wait for the restart."""
    done = Event()

    def refuse() -> None:
        while not done.is_set():
            if server.lives:
                done.wait(0.2)
            elif select.select([listening], [], [], 0.2)[0] and not server.lives:
                with suppress(OSError):  # it has closed meanwhile
                    listening.accept()[0].close()

    listening.setblocking(False)
    thread = Thread(target=refuse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _answers(address: Address) -> bool:
    # Without the environment's proxy, which cannot reach this machine's loopback interface.
    try:
        with build_opener(ProxyHandler({})).open(f"{address.api}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _client() -> "SyncPrefectClient":
    return late.get_client(sync_client=True)


def _end_runs(stop: Stop, server: Part, worker: Part, home: Path) -> None:
    if server.lives:
        with suppress(late.HTTPError), _client() as client:
            if stop.for_good:
                cancel_all(client, CANCEL_SECONDS)
            else:
                leave_all(client, home, worker.stop)
    # Parts that could not be checked.
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)


def _prepare(folder: Path, address: Address, found: Mapping[str, Any], password: str | None) -> str:
    """Write the settings with which `prefect` commands find the server; return the message shown when it is ready."""
    # Variables take precedence over files, and other shells probably have them, too.
    variables = folder_variables(folder)
    exported = {**variables, **os.environ}.get(API, address.api)
    write_environment(folder, address.api, password)
    if not found and not (folder / TEMPLATE.name).exists():
        text = TEMPLATE.read_text("utf-8").replace(Address(4200).api, address.api)
        write(folder / TEMPLATE.name, text)
        _say("wrote prefect.toml, by which `prefect` commands in this folder find the server")
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
        here += f"not followed     {', '.join(ignored)} among Prefect's settings in this folder; required variables\n"
    return f"""
Prefect's page   {address.page}{opened}
reports          {reports}
{here}start a run      {program("prefect")} deployment run {name} -p recipe=first-steps
other folders    {environment}; name it meta-train/meta-train there
stop             Ctrl-C
"""


def _tell(words: str) -> None:
    """Report events since the last check."""
    _say(f"{datetime.now():%Y-%m-%d %H:%M:%S} | metaloom serve: {words}")


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
