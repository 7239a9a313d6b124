"""Restarting of flow runs whose process has ended, under `metaloom serve`. They continue from stored outputs.

Prefect does not restart them: a flow run with a killed process stays Crashed, without worker or server at that moment
it stays Running forever, and if its worker missed the server's messages it can no longer be cancelled.
"""

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

from metaloom.flows.prefect_app import late
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.storage.write.holder import LOCK_NAME

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

POOL = "local"
# Work queue of trainings. A concurrency limit of a deployment would be a lease that a flow must renew with the server,
# or be ended.
QUEUE, TRAININGS = "training", 1
# Longer stages are aborted: a cancelled flow run ends within 15 s.
STAGE_SECONDS = 10.0
# Prefect's worker normally handles this first, but not after it has lost the server.
DEAF_SECONDS = 3.0
# A worker may report the end of a process late, after another one was started.
SETTLED_SECONDS = 5.0
# A process that has reported its crash has ended by then.
ENDED_SECONDS = 20.0
# Limit of crashes in a short time.
CRASHES, CRASH_SECONDS = 3, 600.0
UNFINISHED = ("PENDING", "RUNNING", "CANCELLING")


class Caretaker:
    """Supervises the flow runs of the pool, whose only worker belongs to `metaloom serve`."""

    def __init__(self, home: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._say, self._clock = home, say, clock
        self._began = datetime.now(UTC)
        self._worker_began = self._began
        self._restarts: dict[UUID, list[float]] = defaultdict(list)
        self._given_up: set[UUID] = set()
        self._asked: set[UUID] = set()
        # Seen once without a process: it may have just ended, and its worker may be about to report.
        self._missed: set[UUID] = set()

    def worker_lost(self) -> None:
        """End the processes of flow runs whose worker has ended, after their stage."""
        end_processes(flow_processes(self._home).values(), STAGE_SECONDS + 2)
        self._worker_began = datetime.now(UTC)

    def look(self, client: "SyncPrefectClient") -> None:
        """Restart flow runs that lost their process, and stop cancelled ones."""
        processes = flow_processes(self._home)
        missed: set[UUID] = set()
        for run in [*flow_runs(client, *UNFINISHED), *flow_runs(client, "CRASHED", "CANCELLED", since=self._began)]:
            state = state_of(run)
            if run.id in processes:
                self._look_at_living(client, run, processes[run.id])
            elif state.is_cancelled():
                continue
            elif state.is_crashed():
                if _age(state) > SETTLED_SECONDS:
                    self._restart(client, run)
            elif state.is_pending() and state.timestamp > self._worker_began:
                continue  # its process is about to start
            elif run.id not in self._missed:
                missed.add(run.id)
            elif state.is_cancelling():
                _set_cancelled(client, run)
            else:
                self._restart(client, run)
        self._missed = missed

    def _look_at_living(self, client: "SyncPrefectClient", run: "FlowRun", process: psutil.Process) -> None:
        state = state_of(run)
        # A flow run forced to Cancelled was never Cancelling, so its process was not notified.
        is_to_end = state.is_cancelling() or state.is_cancelled()
        if is_to_end and _age(state) > DEAF_SECONDS and run.id not in self._asked:
            self._asked.add(run.id)
            ask_to_end(process)
        elif state.is_crashed() and _age(state) > ENDED_SECONDS:
            # A late report of Prefect's worker about the previous process.
            client.set_flow_run_state(run.id, late.Running(message="its process runs"), force=True)

    def _restart(self, client: "SyncPrefectClient", run: "FlowRun") -> None:
        now = self._clock()
        recent = [at for at in self._restarts[run.id] if now - at < CRASH_SECONDS]
        if run.id in self._given_up:
            return
        if len(recent) >= CRASHES:
            self._given_up.add(run.id)
            self._say(
                f"flow run {run.name} has crashed {len(recent) + 1} times within {CRASH_SECONDS / 60:.0f} minutes and "
                f"is left as it is; `prefect flow-run retry {run.id}` continues it"
            )
            if not state_of(run).is_crashed():
                client.set_flow_run_state(run.id, late.Crashed(message="its process is gone"), force=True)
            return
        self._asked.discard(run.id)
        self._restarts[run.id] = [*recent, now]
        self._say(f"flow run {run.name} has lost its process; it continues from what is stored")
        message = "Its process was gone; it continues from what is stored."
        client.set_flow_run_state(run.id, late.AwaitingRetry(message=message), force=True)


def go_on_with_left_over(client: "SyncPrefectClient", home: Path, say: Callable[[str], None]) -> None:
    """Restart flow runs left over by an earlier server and worker."""
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    for run in flow_runs(client, *UNFINISHED):
        if state_of(run).is_cancelling():
            _set_cancelled(client, run)
        else:
            say(f"flow run {run.name} was left without a worker; it continues from what is stored")
            message = "Its worker was gone; it continues from what is stored."
            client.set_flow_run_state(run.id, late.AwaitingRetry(message=message), force=True)


def cancel_all(client: "SyncPrefectClient", seconds: float) -> None:
    """Cancel the worker's flow runs, and wait until they end."""
    deadline = time.monotonic() + seconds
    message = "metaloom serve was stopped"
    for run in flow_runs(client, *UNFINISHED):
        state = late.Cancelling if state_of(run).is_running() else late.Cancelled
        client.set_flow_run_state(run.id, state(message=message), force=True)
    while flow_runs(client, *UNFINISHED) and time.monotonic() < deadline:
        time.sleep(0.2)


def leave_all(client: "SyncPrefectClient", home: Path, stop_worker: Callable[[], None]) -> None:
    """End flow runs after their stage, so that the next worker continues them."""
    began = datetime.now(UTC)
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    stop_worker()
    # Flow runs started while the others ended.
    end_processes(flow_processes(home).values(), STAGE_SECONDS + 2)
    for run in [*flow_runs(client, *UNFINISHED), *flow_runs(client, "CRASHED", since=began)]:
        if not state_of(run).is_cancelling():
            message = "metaloom serve was stopped; it continues from what is stored when that is started again."
            client.set_flow_run_state(run.id, late.AwaitingRetry(message=message), force=True)


def flow_runs(client: "SyncPrefectClient", *states: str, since: datetime | None = None) -> "list[FlowRun]":
    """Return the pool's flow runs in one of the states that, if `since` is given, ended after it."""
    ended = {"end_time": {"after_": since}} if since else {}
    return client.read_flow_runs(
        flow_run_filter=late.FlowRunFilter.model_validate({"state": {"type": {"any_": [*states]}}, **ended}),
        work_pool_filter=late.WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
    )


def state_of(run: "FlowRun") -> "State":
    """Return the state of a flow run that was selected by state."""
    assert run.state is not None
    return run.state


def flow_processes(home: Path) -> dict[UUID, psutil.Process]:
    """Return the local processes that execute flow runs of a folder's server, by flow run id."""
    found: dict[UUID, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, KeyError, ValueError):
            if MODULE not in process.cmdline() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment: Mapping[str, str] = process.environ()
            # Not by the server's address, which has several spellings.
            if environment["PREFECT_HOME"] == str(home):
                found[UUID(environment["PREFECT__FLOW_RUN_ID"])] = process
    return found


def runs_of(processes: Iterable[psutil.Process]) -> list[Path]:
    """Return the folders of runs written by processes, according to their locks."""
    found: list[Path] = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            found += [Path(file.path).parent for file in process.open_files() if Path(file.path).name == LOCK_NAME]
    return sorted(found)


def ask_to_end(process: psutil.Process) -> None:
    """Ask a flow run's process to finish its stage and end."""
    with suppress(psutil.Error):
        process.send_signal(signal.SIGTERM)


def end_processes(processes: Iterable[psutil.Process], seconds: float) -> None:
    """End flow runs' processes, after their stage if it ends within `seconds`."""
    found = [*processes]
    for process in found:
        ask_to_end(process)
    _, alive = psutil.wait_procs(found, timeout=seconds)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)


def _set_cancelled(client: "SyncPrefectClient", run: "FlowRun") -> None:
    client.set_flow_run_state(run.id, late.Cancelled(message="cancelled; what it has stored stays"), force=True)


def _age(state: "State") -> float:
    return (datetime.now(UTC) - state.timestamp).total_seconds()
