"""What `metaloom serve` does when something ends; test_prefect_server.py kills the real parts."""

import logging
import logging.config
import os
import signal
import socket
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
from metaloom.flows.prefect_app.artifacts import Reporting
from metaloom.flows.prefect_app.deployments import finishing_the_stage
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.prefect_app.flow_runs import Caretaker
from metaloom.flows.prefect_app.home import WithoutFalseAlarms, write_settings
from metaloom.flows.prefect_app.parts import STUCK_SECONDS, Part, ServeError, running
from metaloom.flows.prefect_app.serve import Address, _listening, _refusing

ID = UUID(int=1)
HOME = Path("/served/.prefect")


def until(condition, seconds=30):
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
    with socket.create_connection(listening.getsockname(), timeout=30) as connection:
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

    def test_one_that_is_killed_is_started_again_at_once_and_told(self, now, said):
        lost = []
        with running(Part("it", [*self.SLEEPS], ended=lambda: lost.append(True), clock=now)) as part:
            first = part._process
            assert part.revive(said.append)
            first.kill()
            first.wait()
            assert not part.revive(said.append)
            assert (said, lost) == (["it ended (killed by SIGKILL); starting it again now"], [True])
            assert not part.revive(said.append)  # started
            now.time += 4
            assert part.revive(said.append)
            assert said[-1] == "it is back after 4 s"
            assert part._process.pid != first.pid

    def test_one_that_ends_over_and_over_is_given_more_and_more_time(self, now, said, tmp_path):
        with running(Part("it", [*self.ENDS], log=tmp_path / "log", clock=now)) as part:
            pauses = []
            for _ in range(6):
                part._process.wait()
                part.revive(said.append)
                pauses.append(part._due - now.time)
                now.time = part._due
                part.revive(said.append)
            assert pauses == [0, 2, 5, 15, 60, 60]
            assert said[1] == f"it ended (exit code 1); starting it again in 2 s; its log: {tmp_path / 'log'}"
            part._process.wait()
            now.time += 61  # it has lasted a minute before it ended
            part.revive(said.append)
            assert part._due == now.time

    def test_one_that_does_not_answer_any_more_is_ended_and_started_again(self, now, said):
        with running(Part("it", [*self.SLEEPS], answers=lambda: False, clock=now)) as part:
            first = part._process
            now.time += 10 * STUCK_SECONDS  # nobody looked, since something else took so long
            assert not part.revive(said.append)
            now.time += STUCK_SECONDS
            assert not part.revive(said.append)
            assert said == []
            now.time += 1
            part.revive(said.append)
            assert said == ["it has not answered for 90 s; starting it again now"]
            assert first.poll() is not None

    def test_its_port_is_held_while_it_is_gone_and_nobody_waits_there(self, now, said):
        """By the process that keeps it, so that nobody else can listen there in between."""
        with _listening(Address(free_port())) as listening:
            number = listening.fileno()
            code = (
                f"import socket, select; s = socket.socket(fileno={number})\n"
                "while select.select([s], [], []): s.accept()[0].sendall(b'served')"
            )
            arguments = ["timeit", "-n", "1", "-r", "1", code]
            with running(Part("it", arguments, clock=now, inherits=(number,))) as part, _refusing(listening, part):
                assert heard(listening) == b"served"
                part._process.kill()
                part._process.wait()
                part.revive(said.append)
                assert heard(listening) == b""
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(listening.getsockname())
                part.revive(said.append)
                assert heard(listening) == b"served"

    def test_a_problem_at_the_start_has_the_end_of_the_log(self, tmp_path):
        log = tmp_path / "log"
        with running(Part("it", [*self.ENDS], log=log)) as part:
            part._process.wait()
            log.write_text("".join(f"line {i}\n" for i in range(20)))
            with pytest.raises(ServeError, match=r"^it ended; the end of .*log:\nline 5\n(.*\n)*line 19$"):
                raise part.explain("ended")

    def test_parts_end_with_the_process_that_started_them(self):
        code = (
            "from metaloom.flows.prefect_app.parts import Part; import time\n"
            f"part = Part('it', {[*self.SLEEPS]!r}); part.start()\n"
            "print(part._process.pid, flush=True); time.sleep(60)"
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

    @pytest.mark.parametrize("state", [Running(), past(Pending(), 7200)])
    def test_a_flow_run_without_a_process_goes_on_when_that_is_seen_twice(self, caretaker, said, state):
        server = Server(state)
        caretaker.look(server)
        assert server.set == []
        caretaker.look(server)
        assert server.set == ["AwaitingRetry"]
        assert said == ["flow run first has lost its process; it continues from what is stored"]

    def test_a_flow_run_whose_process_is_about_to_start_is_left_alone(self, caretaker):
        server = Server(Pending())
        caretaker.worker_lost()
        server.run.state = Pending()
        for _ in range(3):
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
            "flow run first has crashed 4 times within 10 minutes and is left as it is; "
            f"`prefect flow-run retry {ID}` continues it"
        ]

    def test_crashes_far_apart_are_mended_each_time(self, caretaker, now):
        server = Server(past(Crashed(), 10))
        for _ in range(6):
            caretaker.look(server)
            server.run.state = past(Crashed(), 10)
            now.time += 601
        assert server.set == ["AwaitingRetry"] * 6

    def test_a_late_report_about_the_process_before_is_put_right(self, caretaker, processes):
        processes[ID] = None
        server = Server(past(Crashed(), 10))
        caretaker.look(server)
        assert server.set == []  # it may be ending just now
        server.run.state = past(Crashed(), 21)
        caretaker.look(server)
        assert server.set == ["Running"]

    def test_a_cancelled_one_that_its_worker_does_not_hear_of_is_asked_to_end(self, caretaker, processes):
        signals = []
        processes[ID] = SimpleNamespace(send_signal=signals.append)
        server = Server(past(Cancelling(), 1))
        caretaker.look(server)
        assert signals == []
        server.run.state = past(Cancelling(), 4)
        caretaker.look(server)
        caretaker.look(server)
        assert signals == [signal.SIGTERM]
        processes.clear()
        caretaker.look(server)
        caretaker.look(server)
        assert server.set == ["Cancelled"]

    def test_one_that_is_set_to_cancelled_by_force_is_asked_to_end_once_and_stays_cancelled(self, caretaker, processes):
        signals = []
        processes[ID] = SimpleNamespace(send_signal=signals.append)
        server = Server(past(Cancelled(), 1))
        caretaker.look(server)
        assert signals == []  # it may be ending just now
        server.run.state = past(Cancelled(), 4)
        caretaker.look(server)
        caretaker.look(server)
        processes.clear()
        caretaker.look(server)
        assert (signals, server.set) == ([signal.SIGTERM], [])

    @pytest.mark.parametrize(
        ("state", "left"),
        [(Running(), True), (Cancelling(), False), (past(Crashed(), 7200), False), (Completed(), False)],
    )
    def test_a_service_that_is_stopped_leaves_what_is_in_progress_to_the_next(self, processes, state, left):
        stopped = []

        def stop_worker():
            stopped.append(True)
            if server.run.state.is_running():
                server.run.state = Crashed()  # as it reports that the process has ended

        server = Server(state)
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
        with finishing_the_stage() as asked:
            assert not asked.received
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # of the caretaker, besides the worker's
            assert asked.received
            state = asked.outcome("3 iterations")
        os.kill(os.getpid(), signal.SIGTERM)  # while Prefect tells the server
        assert (state.type, state.message) == (Cancelled().type, "cancelled after 3 iterations")
        assert prefect == []

    def test_a_process_that_is_ended_otherwise_is_left_to_prefect(self, prefect, monkeypatch):
        self.state(monkeypatch, Running())
        with finishing_the_stage() as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            asked.outcome("3 iterations")
        assert prefect == [signal.SIGTERM]

    def test_a_long_stage_is_broken_off(self, prefect, monkeypatch):
        monkeypatch.setattr(deployments, "STAGE_SECONDS", 0.05)
        with finishing_the_stage():
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: prefect == [signal.SIGTERM])


class TestPage:
    """What a training does about a page that cannot be reached."""

    @pytest.fixture
    def report(self, now):
        return Reporting(logging.getLogger("test"), now, lambda: None)

    def test_a_server_that_is_away_is_told_once_and_asked_again_now_and_then(self, report, now, monkeypatch, caplog):
        caplog.set_level(logging.INFO)
        probes, shown = [OSError(), None], []
        client = SimpleNamespace(api_healthcheck=lambda: probes.pop(0))
        monkeypatch.setattr(artifacts, "_quick_client", lambda: nullcontext(client))

        def refused():
            raise httpx.ConnectError("refused")

        report(refused)
        for _ in range(11):
            now.time += 1
            report(lambda: shown.append(now.time))
        assert [record.getMessage() for record in caplog.records] == [
            "Prefect's server does not answer (ConnectError); training continues, and the page waits for the server",
            "Prefect's server answers again",
        ]
        assert shown == [1010.0, 1011.0]
        assert probes == []


class TestLog:
    def record(self, name, message, error=None):
        kind = (type(error), error, None) if error else None
        return logging.LogRecord(name, logging.ERROR, "", 0, message, None, kind)

    @pytest.mark.parametrize(
        ("name", "message", "error"),
        [
            ("prefect.FlowRunCancellingObserver", "The websocket failed", OSError()),
            ("asyncio", "Exception in callback FlowRunCancellingObserver._handle_polling_task_done()", None),
            ("prefect.flow_runs", "Engine execution exited with unexpected exception", CancelledRun()),
            ("prefect.flow_runs", "Crash detected! Execution was aborted by a termination signal.", None),
            ("prefect.engine", "Execution of flow run '1' interrupted by base exception", TerminationSignal(15)),
            ("prefect._internal.concurrency", "Service 'EventsWorker' failed to process item Event()", None),
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
