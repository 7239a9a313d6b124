"""What `metaloom serve` does when something ends; test_prefect_server.py kills the real parts."""

import logging
import logging.config
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import httpx
import prefect.logging.configuration
import psutil
import pytest
import yaml
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Pending, Running
from prefect_server import free_port

from metaloom.flows.prefect_app import artifacts, deployments, flow_runs
from metaloom.flows.prefect_app.artifacts import TrainingPage
from metaloom.flows.prefect_app.deployments import finishing_the_stage
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.prefect_app.flow_runs import Caretaker
from metaloom.flows.prefect_app.home import Address, WithoutFalseAlarms, write_settings
from metaloom.flows.prefect_app.parts import Part, ServeError, StopRequest, running
from metaloom.flows.prefect_app.serve import _listening

ID = UUID(int=1)
HOME = Path("/served/.prefect")


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Now:
    """A clock that is set by hand."""

    def __init__(self):
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def heard(listening: socket.socket) -> bytes:
    """What is said to who connects."""
    with socket.create_connection(listening.getsockname(), timeout=120) as connection:
        return connection.recv(6)


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def said():
    return []


class TestPart:
    """A part is any module; those of Python's own here."""

    SLEEPS = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")
    ENDS = ("timeit", "-n", "1", "-r", "1", "raise ValueError")

    @pytest.mark.parametrize("ended", ["the server", "the worker"])
    def test_one_that_ends_ends_serve_with_what_starts_it_again(self, monkeypatch, tmp_path, ended):
        monkeypatch.setattr(flow_runs, "LOOK_SECONDS", 0.01)
        with running("the server", self.SLEEPS) as server, running("the worker", self.SLEEPS) as worker:
            killed = server if ended == "the server" else worker
            killed.process.kill()
            killed.process.wait()
            told = rf"^{ended} ended \(killed by SIGKILL\), and so did `metaloom serve`; flow runs continue .* systemd"
            with pytest.raises(ServeError, match=told):
                flow_runs._keep_running(StopRequest(), server, worker, tmp_path)

    def test_its_port_is_held_when_it_has_ended_and_nobody_waits_there(self):
        """By the process that keeps it, so that nobody else can listen there until that has stopped the rest."""
        with _listening(Address(free_port())) as listening:
            number = listening.fileno()
            code = (
                f"import socket, select; s = socket.socket(fileno={number})\n"
                "s.setblocking(False)\n"
                "while select.select([s], [], []): s.accept()[0].sendall(b'served')"
            )
            with running("it", ["timeit", "-n", "1", "-r", "1", code], inherits=(number,)) as part:
                assert heard(listening) == b"served"
                part.process.kill()
                part.process.wait()
                flow_runs._end_runs(StopRequest(), part, listening, lambda: None, HOME)
                assert heard(listening) == heard(listening) == b""
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(listening.getsockname())

    def test_a_problem_at_the_start_has_the_end_of_the_log(self, tmp_path):
        log = tmp_path / "log"
        with running("it", self.ENDS, log) as part:
            part.process.wait()
            log.write_text("".join(f"line {i}\n" for i in range(20)))
            with pytest.raises(ServeError, match=r"^it ended with code 1; the end of .*log:\nline 5\n(.*\n)*line 19$"):
                flow_runs._wait(StopRequest(), part, lambda: False)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600  # it may contain what only this user may read

    @pytest.mark.parametrize(
        ("code", "how"), [(0, "exit code 0"), (1, "exit code 1"), (-1, "killed by SIGHUP"), (-9, "killed by SIGKILL")]
    )
    def test_one_that_ends_is_told_with_its_exit_code_or_signal(self, code, how):
        with pytest.raises(ServeError, match=rf"^it ended \({how}\), and so did `metaloom serve`"):
            Part("it", SimpleNamespace(poll=lambda: code)).require()

    def test_parts_end_with_the_process_that_started_them(self):
        code = (
            "from metaloom.flows.prefect_app.parts import running; import time\n"
            f"with running('it', {[*self.SLEEPS]!r}) as part:\n"
            "    print(part.process.pid, flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            part = psutil.Process(int(parent.stdout.readline()))
            parent.kill()
        until(lambda: not part.is_running() or part.status() == psutil.STATUS_ZOMBIE)


class Server:
    """Stands for the client of a Prefect server with one flow run."""

    def __init__(self, state):
        self.run = SimpleNamespace(id=ID, name="first", state=state)
        self.set = []

    def read_flow_runs(self, flow_run_filter, work_pool_filter):
        assert work_pool_filter.name.any_ == ["local"]
        asked = flow_run_filter.model_dump()
        is_of = self.run.state.type in asked["state"]["type"]["any_"]
        since = (asked["end_time"] or {}).get("after_")
        return [self.run] if is_of and (since is None or self.run.state.timestamp >= since) else []

    def set_flow_run_state(self, id, state, force):
        assert (id, force) == (ID, True)
        self.set.append(state.name)
        self.run.state = state


def past(state, seconds):
    return state.model_copy(update={"timestamp": datetime.now(UTC) - timedelta(seconds=seconds)})


class TestCaretaker:
    @pytest.fixture
    def processes(self, monkeypatch):
        found = {}
        monkeypatch.setattr(flow_runs, "flow_processes", lambda api: found)
        return found

    @pytest.fixture
    def caretaker(self, processes, said, now):
        caretaker = Caretaker(HOME, said.append, now)
        caretaker._began = datetime.now(UTC) - timedelta(hours=1)
        return caretaker

    @pytest.mark.parametrize("state", [past(Running(), 7200), past(Pending(), 7200)])
    def test_a_flow_run_that_nobody_calls_crashed_is_left_alone(self, caretaker, state):
        server = Server(state)
        caretaker.look(server)
        assert server.set == []

    def test_a_crashed_one_goes_on_when_its_worker_has_had_time_to_report(self, caretaker):
        server = Server(past(Crashed(), 2))
        caretaker.look(server)
        assert server.set == []
        server.run.state = past(Crashed(), 6)
        caretaker.look(server)
        assert server.set == ["AwaitingRetry"]

    def test_what_crashed_before_serve_began_stays_crashed(self, caretaker):
        server = Server(past(Crashed(), 7200))
        for _ in range(3):
            caretaker.look(server)
        assert server.set == []

    def test_what_crashes_over_and_over_is_left_and_told_once(self, caretaker, said, now):
        server = Server(past(Crashed(), 10))
        for _ in range(6):
            caretaker.look(server)
            server.run.state = past(Crashed(), 10)
            now.time += 30
        assert server.set == ["AwaitingRetry"] * 3
        assert said[3:] == [
            "flow run first has crashed 4 times within 10 minutes and will not be restarted again; "
            f"`prefect flow-run retry {ID}` continues it"
        ]

    def test_crashes_far_apart_are_mended_each_time(self, caretaker, now):
        server = Server(past(Crashed(), 10))
        for _ in range(6):
            caretaker.look(server)
            server.run.state = past(Crashed(), 10)
            now.time += 601
        assert server.set == ["AwaitingRetry"] * 6

    def test_a_crashed_one_whose_process_lives_is_left_alone(self, caretaker, processes):
        processes[ID] = None
        server = Server(past(Crashed(), 10))
        caretaker.look(server)
        assert server.set == []

    def test_a_cancelled_one_that_its_worker_does_not_hear_of_is_asked_to_end(self, caretaker, processes):
        signals = []
        processes[ID] = SimpleNamespace(send_signal=signals.append)
        server = Server(past(Cancelling(), 1))
        caretaker.look(server)
        assert signals == []
        server.run.state = past(Cancelling(), 6)
        caretaker.look(server)
        caretaker.look(server)
        assert signals == [signal.SIGTERM]
        processes.clear()
        caretaker.look(server)
        assert server.set == ["Cancelled"]

    def test_a_cancelled_one_whose_process_reports_a_crash_is_cancelled_and_restarted_if_it_crashes_when_retried(
        self, caretaker, processes
    ):
        processes[ID] = SimpleNamespace(send_signal=lambda number: None)
        server = Server(past(Cancelling(), 6))
        caretaker.look(server)
        processes.clear()
        server.run.state = past(Crashed(), 6)  # asked to end before its flow had begun
        caretaker.look(server)
        assert server.set == ["Cancelled"]
        server.run.state = past(Crashed(), 6)  # the user has retried it
        caretaker.look(server)
        assert server.set == ["Cancelled", "AwaitingRetry"]

    def test_one_that_completed_when_asked_to_end_is_restarted_if_it_crashes_when_retried(self, caretaker, processes):
        processes[ID] = SimpleNamespace(send_signal=lambda number: None)
        server = Server(past(Cancelling(), 6))
        caretaker.look(server)
        processes.clear()
        for state in (Completed(), Crashed()):
            server.run.state = past(state, 6)
            caretaker.look(server)
        assert server.set == ["AwaitingRetry"]

    def test_one_that_is_set_to_cancelled_by_force_is_asked_to_end_once_and_stays_cancelled(self, caretaker, processes):
        signals = []
        processes[ID] = SimpleNamespace(send_signal=signals.append)
        server = Server(past(Cancelled(), 1))
        caretaker.look(server)
        assert signals == []  # it may be ending just now
        server.run.state = past(Cancelled(), 6)
        caretaker.look(server)
        caretaker.look(server)
        processes.clear()
        caretaker.look(server)
        assert (signals, server.set) == ([signal.SIGTERM], [])

    @pytest.mark.parametrize(
        ("state", "seconds", "left"),
        [
            (Running(), 2, True),
            (Crashed(), 2, True),
            (Cancelling(), 2, False),
            (Crashed(), 7200, False),
            (Completed(), 2, False),
        ],
    )
    def test_a_service_that_is_stopped_leaves_what_is_in_progress_to_the_next(self, processes, state, seconds, left):
        stopped = []

        def stop_worker():
            stopped.append(True)
            if server.run.state.is_running():
                server.run.state = Crashed()  # as it reports that the process has ended

        server = Server(past(state, seconds))
        flow_runs.leave_all(server, HOME, stop_worker)
        assert (stopped, server.set) == ([True], ["AwaitingRetry"] if left else [])

    def test_processes_of_flow_runs_are_known_by_the_folder_they_are_served_from_and_id(self):
        code = "import time; time.sleep(60)"
        environment = os.environ | {"PREFECT_HOME": str(HOME), "PREFECT__FLOW_RUN_ID": str(ID)}
        arguments = [sys.executable, "-c", code, MODULE]
        with subprocess.Popen(arguments, env=environment) as process:
            until(lambda: ID in flow_runs.flow_processes(HOME))
            assert flow_runs.flow_processes(HOME)[ID].pid == process.pid
            assert ID not in flow_runs.flow_processes(HOME / "other")
            flow_runs.end_processes(flow_runs.flow_processes(HOME).values(), 10)
            assert not psutil.pid_exists(process.pid)

    def test_a_process_that_does_not_end_is_killed(self):
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            flow_runs.end_processes([psutil.Process(process.pid)], 0.2)
            assert not psutil.pid_exists(process.pid)


class TestCancelling:
    @pytest.fixture
    def prefect(self, monkeypatch):
        """Prefect's own handler, which is in place when a flow begins."""
        broken_off = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: broken_off.append(number))
        yield broken_off
        signal.signal(signal.SIGTERM, before)

    def state(self, monkeypatch, state):
        client = SimpleNamespace(read_flow_run=lambda id: SimpleNamespace(state=state))
        monkeypatch.setattr(deployments, "get_client", lambda sync_client: nullcontext(client))
        monkeypatch.setattr(deployments.flow_run, "get_id", lambda: str(ID))

    @pytest.mark.parametrize("state", [Cancelling(), Cancelled()])
    def test_the_stage_is_finished_and_the_flow_run_is_cancelled(self, prefect, monkeypatch, state):
        self.state(monkeypatch, state)
        with finishing_the_stage() as (asked, prefects):
            assert not asked.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # of the caretaker, besides the worker's
            assert asked.is_set()
        state = deployments._ended(prefects, "3 iterations")
        os.kill(os.getpid(), signal.SIGTERM)  # while Prefect tells the server
        assert (state.type, state.message) == (Cancelled().type, "cancelled after 3 iterations")
        assert prefect == []

    def test_a_process_that_is_ended_otherwise_is_left_to_prefect(self, prefect, monkeypatch):
        self.state(monkeypatch, Running())
        with finishing_the_stage() as (_, prefects):
            os.kill(os.getpid(), signal.SIGTERM)
        deployments._ended(prefects, "3 iterations")
        assert prefect == [signal.SIGTERM]

    def test_a_long_stage_is_broken_off(self, prefect, monkeypatch):
        monkeypatch.setattr(deployments, "STAGE_SECONDS", 0.05)
        with finishing_the_stage():
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: prefect == [signal.SIGTERM])


class TestPage:
    def test_a_server_that_is_away_is_told_once_and_asked_again_now_and_then(self, now, monkeypatch, caplog):
        monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger("test"))
        page, tried = TrainingPage(Path("runs/first"), clock=now), []

        def refused():
            tried.append(now.time)
            raise httpx.ConnectError("refused")

        for _ in range(65):
            page._report(refused)
            now.time += 1
        page._report(lambda: tried.append("at the end"), always=True)
        assert tried == [1000, 1030, 1060, "at the end"]
        assert [record.getMessage() for record in caplog.records] == [
            "The page does not show all of this run, which continues: refused",
        ]


class TestLog:
    def record(self, name, message, error=None):
        kind = (type(error), error, None) if error else None
        return logging.LogRecord(name, logging.ERROR, "", 0, message, None, kind)

    @pytest.mark.parametrize(
        ("name", "message", "error"),
        [
            ("prefect.flow_runs", "Engine execution exited with unexpected exception", CancelledRun()),
            ("prefect.flow_runs", "Crash detected! Execution was aborted by a termination signal.", None),
            ("prefect.engine", "Execution of flow run '1' interrupted by base exception", TerminationSignal(15)),
        ],
    )
    def test_alarms_about_what_is_mended_are_left_out(self, name, message, error):
        assert not WithoutFalseAlarms().filter(self.record(name, message, error))

    @pytest.mark.parametrize(
        ("name", "message", "error"),
        [
            ("asyncio", "Exception in callback", None),
            ("prefect.flow_runs", "Crash detected! Execution was cancelled by the runtime environment.", None),
            ("prefect.flow_runs", "Engine execution exited with unexpected exception", ValueError()),
        ],
    )
    def test_all_else_is_shown(self, name, message, error):
        assert WithoutFalseAlarms().filter(self.record(name, message, error))

    def test_prefect_reads_its_own_settings_with_the_filter(self, tmp_path):
        found = yaml.safe_load(write_settings(tmp_path).read_text())
        own = yaml.safe_load(prefect.logging.configuration.DEFAULT_LOGGING_SETTINGS_PATH.read_text())
        assert found["loggers"] == own["loggers"]
        logging.config.DictConfigurator(
            {"version": 1, "filters": found["filters"], "handlers": {"console": {"class": "logging.StreamHandler"}}}
        ).configure_filter(found["filters"]["false_alarms"])
        assert all(handler["filters"] == ["false_alarms"] for handler in found["handlers"].values())
