import errno
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from prefect_server import clean_environment

from metaloom.flows.commands import doctor


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server_url():
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


def test_an_old_python_fails_and_this_one_does_not():
    assert not doctor.check_python((3, 10)).ok
    assert doctor.check_python((3, 10)).found == "3.10"
    assert doctor.check_python((3, 11)).ok
    assert doctor.check_python().status == "ok"


def test_every_runtime_requirement_of_this_installation_is_met():
    checks = {check.name: check for check in doctor.check_packages()}
    assert {"torch", "mujoco", "fastapi", "zarr"} <= set(checks)
    assert "pytest" not in checks  # an extra
    assert {check.status for check in checks.values()} == {"ok"}


def test_a_package_outside_its_range_or_missing_fails_with_the_command_that_helps():
    wrong, missing = doctor.check_packages(["numpy<1", "no-such-package-at-all>=2"])
    assert (wrong.status, wrong.required) == ("fail", "<1")
    assert "pip install 'numpy<1'" in wrong.advice
    assert (missing.status, missing.found, missing.advice) == ("fail", "not installed", "make setup")


def test_a_version_before_its_release_counts_as_one_in_the_range(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.5.0rc1")
    (check,) = doctor.check_packages(["numpy>=2"])
    assert (check.status, check.found, check.required) == ("ok", "2.5.0rc1", ">=2")


def test_low_memory_and_a_full_disk_are_told(tmp_path):
    assert [doctor.check_memory(free).status for free in (1.99e9, 2e9)] == ["warn", "ok"]
    kinds = {4.9e8: "fail", 5e8: "warn", 9.9e9: "warn", 1e10: "ok"}
    assert {free: doctor.check_disk_space(tmp_path, free).status for free in kinds} == kinds
    required = [check.required for check in (doctor.check_memory(1e9), doctor.check_disk_space(tmp_path))]
    assert required == ["2 GB free", "10 GB free"]


def test_free_memory_is_what_the_system_says_or_all_of_it_where_it_says_nothing(monkeypatch):
    monkeypatch.setattr(doctor.Path, "read_text", lambda file: "MemTotal:  9 kB\nMemAvailable:   3000000 kB\n")
    assert doctor.check_memory().found == "3.07 GB free"
    monkeypatch.setattr(doctor.Path, "read_text", lambda file: "MemTotal:  9 kB\n")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**6}.get)
    assert doctor.check_memory().found == "4.1 GB free"


@pytest.mark.parametrize(("cores", "status"), [(1, "warn"), (2, "ok")])
def test_a_single_core_is_a_warning(cores, status, monkeypatch):
    monkeypatch.setattr("metaloom.flows.rollouts.workers.usable_cores", lambda: cores)
    check = doctor.check_cores()
    assert (check.status, check.found) == (status, str(cores))


def test_git_is_found_or_missed(monkeypatch):
    for found, told in (("/usr/bin/git", ("ok", "/usr/bin/git")), (None, ("warn", "not installed"))):
        monkeypatch.setattr(doctor.shutil, "which", lambda name, found=found: found)
        check = doctor.check_git()
        assert (check.status, check.found) == told


def test_settings_of_dask_that_can_be_read_are_fine():
    assert doctor.check_dask_settings().status == "ok"


def test_a_runs_folder_that_does_not_exist_yet_is_fine_and_stays_so(tmp_path, monkeypatch):
    root = tmp_path / "not" / "yet"
    assert doctor.check_runs_folder(root).status == "ok"
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    assert doctor.check_disk_speed(root).found.endswith("/s with fsync")
    assert synced == [doctor.PROBE_BYTES]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacks", ["os.link", "os.replace", "fcntl.flock"])
def test_a_file_system_without_hard_links_renaming_or_locks_fails(lacks, tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lacks, refuse)
    check = doctor.check_runs_folder(tmp_path)
    assert (check.status, check.found) == ("fail", f"{tmp_path}: Operation not permitted")
    assert "METALOOM_RUNS" in check.advice


@pytest.mark.parametrize("below", ["", "runs", "runs/more"])
def test_a_runs_folder_that_is_a_file_or_below_one_fails_and_another_folder_helps(tmp_path, below):
    (tmp_path / "file").write_text("")
    checks = {check.name: check for check in doctor.check_all(tmp_path / "file" / below)}
    for name in ("runs folder", "disk space", "disk speed"):
        assert checks[name].status == "fail"
        assert "is a file" in checks[name].found
        assert "METALOOM_RUNS" in checks[name].advice
        assert ".venv" not in checks[name].advice


def test_a_disk_that_fills_up_while_it_is_measured_fails_and_another_folder_helps(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor, "_fsync_bytes_per_second", full)
    check = next(check for check in doctor.check_all(tmp_path) if check.name == "disk speed")
    assert (check.status, "METALOOM_RUNS" in check.advice, ".venv" in check.advice) == ("fail", True, False)


def test_a_slow_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_fsync_bytes_per_second", lambda folder: 1e6)
    check = doctor.check_disk_speed(tmp_path)
    assert (check.status, check.found, check.required) == ("warn", "1 MB/s with fsync", "20 MB/s")
    monkeypatch.setattr(doctor, "_fsync_bytes_per_second", lambda folder: 2e7)
    assert doctor.check_disk_speed(tmp_path).status == "ok"


def test_a_disk_is_as_fast_as_it_writes_and_syncs(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=iter([10.0, 12.0]).__next__))
    assert doctor.check_disk_speed(tmp_path).found == "8 MB/s with fsync"


def test_batched_physics_works_here_and_a_step_without_finite_numbers_fails(monkeypatch):
    assert doctor.check_physics().status == "ok"
    fallen = SimpleNamespace(observations=np.array([[0.0, np.nan]]))
    env = SimpleNamespace(action_size=6, reset=print, step=lambda actions, rows: fallen, close=print)
    monkeypatch.setattr(doctor, "make_batch_env", lambda *_: env)
    check = doctor.check_physics()
    assert (check.status, check.found, check.required) == ("fail", "a batched step returned NaN", "finite numbers")


def test_a_prefect_server_is_optional(server_url):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
        assert doctor.check_prefect_server("").found == "none configured"
        dead = doctor.check_prefect_server(dead_url)
    assert dead.ok
    assert "not running" in dead.found
    assert doctor.check_prefect_server(server_url).found == f"{server_url} answers"
    assert doctor.check_prefect_server("file:///etc/passwd").status == "warn"


@pytest.mark.parametrize(("url", "found"), [("ftp://here", "ftp://here"), (None, "none configured")])
def test_the_prefect_server_is_the_one_of_the_settings(url, found, monkeypatch):
    settings = SimpleNamespace(api=SimpleNamespace(url=url))
    monkeypatch.setattr("prefect.settings.get_current_settings", lambda: settings)
    assert doctor.check_prefect_server().found == found


def test_a_probe_that_breaks_becomes_a_failed_check(tmp_path, monkeypatch):
    def broken():
        raise ImportError("libmujoco.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "check_physics", broken)
    check = next(check for check in doctor.check_all(tmp_path) if check.name == "physics")
    assert not check.ok
    assert "libmujoco.so" in check.found
    assert "make setup" in check.advice


@pytest.mark.parametrize(
    ("file", "text", "variables", "found", "advice"),
    [
        ("prefect.toml", "[api", {}, "prefect.toml: Expected ']'", "repair prefect.toml, or remove it"),
        ("home/.prefect/profiles.toml", "[x", {}, "profiles.toml: Expected ']'", "profiles.toml, or remove it"),
        (
            "mine.toml",
            "[x",
            {"PREFECT_PROFILES_PATH": "mine.toml"},
            "mine.toml: Expected",
            "repair mine.toml, or remove",
        ),
        (".env", "PREFECT_SERVER_API_PORT=abc", {}, "ServerAPISettings.port = 'abc'", "or .env in this folder"),
        (
            ".env",
            "",
            {"ANOTHER": "abc", "PREFECT_LOGGING_LEVEL": "INFO", "PREFECT_SERVER_API_PORT": "abc"},
            "port = 'abc'",
            "unset PREFECT_SERVER_API_PORT",
        ),
    ],
)
def test_settings_that_prefect_cannot_read_are_named_with_what_mends_them(
    tmp_path, file, text, variables, found, advice
):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    code = (
        "import json; from dataclasses import asdict; from metaloom.flows.commands.doctor import *\n"
        "print(json.dumps(asdict(check_prefect_server())))"
    )
    environment = clean_environment(HOME=str(tmp_path / "home")) | variables
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    check = json.loads(done.stdout)
    assert (check["status"], done.stderr) == ("warn", "")
    assert found in check["found"]
    assert advice in check["advice"]


@pytest.mark.parametrize("text", ["distributed: [a", "- 1"])
def test_settings_of_dask_that_cannot_be_read_are_named_in_the_table_and_in_one_line(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    environment = clean_environment(DASK_CONFIG=str(tmp_path / "mine.yaml"))
    command = [sys.executable, "-P", "-m", "metaloom.flows.cli"]
    ways = (["doctor", "--json"], ["train", "first-steps", "--set", "iterations=1"])
    told, refused = (
        subprocess.run([*command, *way], cwd=tmp_path, env=environment, capture_output=True, text=True) for way in ways
    )
    (check,) = [check for check in json.loads(told.stdout) if check["name"] == "dask settings"]
    assert (told.returncode, check["status"], check["advice"]) == (1, "fail", "repair that file, or remove it")
    assert str(tmp_path / "mine.yaml") in check["found"]
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"metaloom: A dask config file at '{tmp_path / 'mine.yaml'}' is malformed")
    assert not (tmp_path / "runs").exists()
