"""Supervision of `metaloom serve`: ends all parts together, and restarts flow runs that lose their process.

Prefect does not restart such flow runs: if the process was killed, the flow run stays Crashed, and if its worker or
server ended first, it stays Running forever. This module imports Prefect, which must not happen in an untrusted folder.
"""

import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Cancelling

from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.prefect_app.home import DATABASE, Address
from metaloom.flows.prefect_app.parts import START_SECONDS, Interrupted, Part, ServeError, StopRequest, running, say
from metaloom.storage import argument
from metaloom.storage.write.holder import LOCK_NAME

POOL = "local"
# Work queue for training runs. A deployment's concurrency limit would be a lease: a flow that cannot renew it is ended.
QUEUE, TRAININGS = "training", 1
# Longer stages are aborted, so that a cancelled flow run ends within 15 s.
STAGE_SECONDS = 10.0
# A worker may report the end of a process after another process has started. It also learns of cancellations first.
SETTLED_SECONDS = 5.0
# Maximum number of crashes within CRASH_SECONDS.
CRASHES, CRASH_SECONDS = 3, 600.0
UNFINISHED = ("PENDING", "RUNNING", "CANCELLING")
LOOK_SECONDS = 1.0
# Longer than the 30 s that Prefect gives a cancelled flow run to end by itself.
CANCEL_SECONDS = 40.0
# Errors of Prefect's client for a server that is unreachable or too busy.
_AWAY = (httpx.HTTPError, PrefectException, RuntimeError)


class Caretaker:
    """Supervisor of the flow runs in the work pool, whose only worker belongs to `metaloom serve`."""

    def __init__(self, home: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._say, self._clock = home, say, clock
        self._began = datetime.now(UTC)
        self._restarts: dict[UUID, list[float]] = defaultdict(list)
        self._given_up: set[UUID] = set()
        self._asked: set[UUID] = set()

    def look(self, client: SyncPrefectClient) -> None:
        """Restart crashed flow runs, and stop cancelled flow runs that their worker has not stopped."""
        runs = [*flow_runs(client, "CANCELLING"), *flow_runs(client, "CRASHED", "CANCELLED", since=self._began)]
        self._asked &= {run.id for run in runs}
        processes = flow_processes(self._home) if runs else {}
        for run in runs:
            state = state_of(run)
            if (datetime.now(UTC) - state.timestamp).total_seconds() < SETTLED_SECONDS:
                continue
            if run.id in processes:
                if not state.is_crashed() and run.id not in self._asked:
                    self._asked.add(run.id)
                    ask_to_end(processes[run.id])
            elif state.is_crashed() and run.id not in self._asked:
                self._restart(client, run)
            else:
                self._asked.discard(run.id)
                # A process that is asked to end before its flow has begun reports a crash.
                if not state.is_cancelled():
                    _set_cancelled(client, run)

    def _restart(self, client: SyncPrefectClient, run: FlowRun) -> None:
        if run.id in self._given_up:
            return
        now = self._clock()
        recent = [at for at in self._restarts[run.id] if now - at < CRASH_SECONDS]
        if len(recent) >= CRASHES:
            self._given_up.add(run.id)
            self._say(
                f"flow run {run.name} has crashed {len(recent) + 1} times within {CRASH_SECONDS / 60:.0f} minutes and "
                f"will not be restarted again; `prefect flow-run retry {run.id}` continues it"
            )
            return
        self._restarts[run.id] = [*recent, now]
        self._say(f"flow run {run.name} has lost its process; it continues from what is stored")
        message = "Its process had ended; it continues from what is stored."
        client.set_flow_run_state(run.id, AwaitingRetry(message=message), force=True)


def restart_left_over(client: SyncPrefectClient, home: Path) -> Iterator[str]:
    """Restart the unfinished flow runs of an earlier server, except cancelled ones; yield a message for each one."""
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    for run in flow_runs(client, *UNFINISHED):
        if state_of(run).is_cancelling():
            _set_cancelled(client, run)
        else:
            yield f"flow run {run.name} was left without a worker; it continues from what is stored"
            message = "Its worker had ended; it continues from what is stored."
            client.set_flow_run_state(run.id, AwaitingRetry(message=message), force=True)


def cancel_all(client: SyncPrefectClient, seconds: float) -> None:
    """Cancel the worker's flow runs, and wait up to `seconds` for them to end."""
    deadline = time.monotonic() + seconds
    message = "metaloom serve was stopped"
    for run in flow_runs(client, *UNFINISHED):
        state = Cancelling if state_of(run).is_running() else Cancelled
        client.set_flow_run_state(run.id, state(message=message), force=True)
    while flow_runs(client, *UNFINISHED) and time.monotonic() < deadline:
        time.sleep(0.2)


def leave_all(client: SyncPrefectClient, home: Path, stop_worker: Callable[[], None]) -> None:
    """End flow runs after their current stage, and mark them so that the next worker continues them."""
    # This includes flow runs that have just crashed, for example because their worker died: the caretaker has not
    # restarted them yet.
    began = datetime.now(UTC) - timedelta(minutes=1)
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    stop_worker()
    # End flow runs that started while the others ended.
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    for run in [*flow_runs(client, *UNFINISHED), *flow_runs(client, "CRASHED", since=began)]:
        if not state_of(run).is_cancelling():
            message = "metaloom serve was stopped; after its restart the flow run continues from what is stored."
            client.set_flow_run_state(run.id, AwaitingRetry(message=message), force=True)


def flow_runs(client: SyncPrefectClient, *states: str, since: datetime | None = None) -> list[FlowRun]:
    """Return the work pool's flow runs in one of the states; with `since`, only flow runs that ended after it."""
    ended = {"end_time": {"after_": since}} if since else {}
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": [*states]}}, **ended}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
    )


def state_of(run: FlowRun) -> State:
    """Return the state of a flow run, which cannot be None because the flow run was selected by its state."""
    assert run.state is not None
    return run.state


def flow_processes(home: Path) -> dict[UUID, psutil.Process]:
    """Return the local processes that execute flow runs for a folder's server, keyed by flow run id."""
    found: dict[UUID, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, KeyError, ValueError):
            if MODULE not in process.cmdline() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment: Mapping[str, str] = process.environ()
            # Not compared by the server's address, which can be spelled in several ways.
            if environment["PREFECT_HOME"] == str(home):
                found[UUID(environment["PREFECT__FLOW_RUN_ID"])] = process
    return found


def runs_of(processes: Iterable[psutil.Process]) -> list[Path]:
    """Return the folders of the runs that processes are writing, according to the lock files that they hold open."""
    found: list[Path] = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            found += [Path(file.path).parent for file in process.open_files() if Path(file.path).name == LOCK_NAME]
    return sorted(found)


def ask_to_end(process: psutil.Process) -> None:
    """Ask a flow run's process to finish its current stage and then end."""
    with suppress(psutil.Error):
        process.send_signal(signal.SIGTERM)


def end_processes(processes: Iterable[psutil.Process], seconds: float) -> None:
    """End the processes of flow runs; each may finish its current stage if that takes at most `seconds`."""
    found = [*processes]
    for process in found:
        ask_to_end(process)
    _, alive = psutil.wait_procs(found, timeout=seconds)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)


def _set_cancelled(client: SyncPrefectClient, run: FlowRun) -> None:
    client.set_flow_run_state(run.id, Cancelled(message="cancelled; stored data is kept"), force=True)


def serve_parts(home: Path, address: Address, listening: socket.socket, stop: StopRequest, ready: str) -> None:
    """Start the parts, wait until one of them ends or the user stops `metaloom serve`, and end all parts."""
    with ExitStack() as stack:
        say("starting the Prefect server ...")
        number = listening.fileno()
        command = ["metaloom.flows.prefect_app.server", address.host, str(number)]
        server = stack.enter_context(running("the Prefect server", command, home / "server.log", (number,)))
        _wait(stop, server, lambda: _answers(address))
        say("deploying the flows ...")
        with running("the deployment of the flows", ["metaloom.flows.prefect_app.deploy"]) as step:
            _wait(stop, step, lambda: step.code == 0, needs=server)
        command = ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "metaloom"]
        working = stack.enter_context(ExitStack())
        worker = working.enter_context(running("the worker", command))
        stack.callback(_end_runs, stop, server, listening, working.close, home)
        say(ready)
        _keep_running(stop, server, worker, home)
        what = "can be resumed" if stop.for_good else "continues when `metaloom serve` is started again"
        say(f"\nstopping; a run that is being trained keeps every stage it has stored, and {what} ...")


def _keep_running(stop: Event, server: Part, worker: Part, home: Path) -> None:
    """Supervise flow runs until `stop` is set. Raise ServeError if a part ends or the database file is removed."""
    # By default, Prefect's client retries for minutes when the server has ended.
    at_once: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: 10.0}
    caretaker = Caretaker(home, lambda words: say(f"{datetime.now():%Y-%m-%d %H:%M:%S} | metaloom serve: {words}"))
    database = home / "prefect.db"
    opened = _identity(database)
    with temporary_settings(at_once), get_client(sync_client=True) as client:
        while not stop.wait(LOOK_SECONDS):
            if _identity(database) != opened:
                runs = runs_of(flow_processes(home).values())
                go_on = "".join(f"\ncontinue with: metaloom resume {argument(run)}" for run in runs)
                raise ServeError(
                    f"{database} was removed, and with it flow runs, schedules and settings made on the page. Stored "
                    f"runs are intact; start `metaloom serve` again{go_on}"
                )
            server.require()
            worker.require()
            with suppress(*_AWAY):  # a busy server is asked again shortly
                caretaker.look(client)


def _identity(database: Path) -> tuple[int, int] | None:
    """Return the device and inode of the SQLite file; None if it is missing or the server has another database."""
    if DATABASE not in os.environ:
        with suppress(OSError):
            found = database.stat()
            return found.st_dev, found.st_ino
    return None


def _wait(
    stop: Event, part: Part, is_ready: Callable[[], bool], seconds: float = START_SECONDS, needs: Part | None = None
) -> None:
    """Wait until a part is ready. Raise ServeError if it fails or `needs` ends, and Interrupted if `stop` is set."""
    deadline = time.monotonic() + seconds
    while True:
        if needs is not None:
            needs.require()
        code = part.code
        if not code and is_ready():
            return
        if code is not None:
            raise part.explain(f"ended with code {code}")
        if time.monotonic() > deadline:
            raise part.explain(f"is not ready after {seconds:.0f} s")
        if stop.wait(0.2):
            raise Interrupted


def _answers(address: Address) -> bool:
    # Bypass any proxy in the environment, since a proxy cannot reach this machine's loopback interface.
    with suppress(httpx.HTTPError):
        return httpx.get(f"{address.api}/health", timeout=2, trust_env=False).status_code == 200
    return False


def _end_runs(
    stop: StopRequest, server: Part, listening: socket.socket, stop_worker: Callable[[], None], home: Path
) -> None:
    if server.code is not None:
        Thread(target=_refuse, args=(listening,), daemon=True).start()
    else:
        with suppress(*_AWAY), get_client(sync_client=True) as client:
            if stop.for_good:
                cancel_all(client, CANCEL_SECONDS)
            else:
                leave_all(client, home, stop_worker)
    # End the processes of flow runs that the server could not report.
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)


def _refuse(listening: socket.socket) -> None:
    """Close incoming connections on behalf of the ended server, so that no client waits for an answer."""
    listening.setblocking(True)
    with suppress(OSError):  # the socket was closed
        while True:
            listening.accept()[0].close()
