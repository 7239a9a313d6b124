"""`metaloom serve` as a process of its own, and what tests ask of it."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from metaloom import storage

PROGRAMS = Path(sys.executable).parent
FINAL_STATES = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Served:
    programs: Path
    folder: Path
    port: int
    pid: int
    log: Path

    @property
    def password(self) -> str:
        return (self.folder / ".prefect" / "password").read_text()

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(self.password.encode()).decode()}"}

    def prefect(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run what a user types in the folder of the server."""
        return typed(self.programs / "prefect", *arguments, folder=self.folder)

    def ask(self, path: str, **body: Any) -> Any:
        return self.tell(path, body)

    def tell(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **self.authorization},
            method=method,
        )
        # 503: the database is busy for a moment, after which Prefect's own client asks again too.
        for seconds in (0.5, 1, 2, 4, 8):
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    told = answer.read()
                    return json.loads(told) if told else None
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(seconds)
        raise TimeoutError(f"{request.full_url} is busy")

    def start(self, flow: str, **parameters: Any) -> str:
        """Starts a flow as the page does, without a process of the command; gives the id of its run."""
        (deployment,) = self.ask("deployments/filter", deployments={"name": {"any_": [flow]}})
        once = {"idempotency_key": str(uuid.uuid4())}
        return self.ask(f"deployments/{deployment['id']}/create_flow_run", parameters=parameters, **once)["id"]

    def finished(self, flow: str, *, seconds: float = 300, **parameters: Any) -> dict[str, Any]:
        """Starts a flow and gives its run once it has ended."""
        id = self.start(flow, **parameters)

        def run() -> dict[str, Any]:
            (found,) = self.ask("flow_runs/filter", flow_runs={"id": {"any_": [id]}})
            return found

        wait_for(lambda: run()["state"]["type"] in FINAL_STATES, f"{flow} has ended", seconds=seconds)
        return run()

    def flow_run(self, name: str) -> dict[str, Any]:
        """The newest flow run of a name."""
        runs = self.ask("flow_runs/filter", flow_runs={"name": {"any_": [name]}}, sort="EXPECTED_START_TIME_DESC")
        assert runs, f"no flow run is called {name}"
        return runs[0]

    def of_flow_run(self, what: str, flow_run_id: str) -> list[dict[str, Any]]:
        return self.ask(f"{what}/filter", flow_runs={"id": {"any_": [flow_run_id]}}, limit=200)


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without settings that the caller may have."""
    ours = ("PREFECT_", "METALOOM_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


def typed(program: Path, *arguments: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [program, *arguments],
        cwd=folder,
        env=clean_environment(COLUMNS="200", **more),
        capture_output=True,
        text=True,
        timeout=240,
    )


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Wait for what a quiet machine has in seconds; one that is ten times as slow has it too."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not so after {seconds:.0f} s"
        time.sleep(0.1)


def free_port() -> int:
    """Find a port that nobody listens on, nor on the one behind it, where `serve` has its reports."""
    while True:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


@contextmanager
def serving(
    programs: Path,
    folder: Path,
    log: Path,
    *options: str,
    stopped_by: signal.Signals | None = signal.SIGINT,
) -> Iterator[Served]:
    """Serve from a folder; when the context ends, all that it started has to, by itself if no signal stops it."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [programs / "metaloom", "serve", "--port", str(port), *options],
            cwd=folder,
            env=clean_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        served = Served(programs, folder, port, process.pid, log)
        wait_for(lambda: "Prefect's page" in log.read_text(), "metaloom serve is announced", seconds=600)
        # What is printed beside the address works at once.
        assert served.tell("deployments/name/meta-train/meta-train", method="GET")["status"] is not None
        wait_for(lambda: "Worker 'metaloom' started!" in log.read_text(), "metaloom serve is ready")
        yield served
        if stopped_by is None:
            process.wait(90)
    except BaseException:
        sys.stderr.write(log.read_text())
        raise
    finally:
        parts = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(stopped_by or signal.SIGINT)
        code = process.wait(90)
    if stopped_by is None:
        assert code == 1
        assert not [*processes_of(folder)]
    else:
        assert log.read_text().endswith("\nstopped\n")
        assert code == 0
    assert not any(part.is_running() for part in parts)


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """Processes that belong to the server of a folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("PREFECT_HOME") == str(folder / ".prefect"):
                yield process


def part_of(served: Served, *words: str) -> psutil.Process:
    """The process that has these words in its command."""
    found = [p for p in psutil.Process(served.pid).children(recursive=True) if {*words} <= {*p.cmdline()}]
    assert len(found) == 1, [process.cmdline() for process in found]
    return found[0]


def iterations_of(folder: Path) -> int:
    return len(storage.open_run(folder).iterations) if (folder / "run.json").exists() else 0
