"""Refusals of `metaloom serve` before it starts anything; all it starts is in test_prefect_server.py."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import yaml
from prefect_server import free_port

from metaloom.flows.errors import UsageError
from metaloom.flows.prefect_app.database import require_answer, server_url, without_password
from metaloom.flows.prefect_app.parts import Stop, alone
from metaloom.flows.prefect_app.reports import address_of, served_reports
from metaloom.flows.prefect_app.serve import HERE, Address, _folder_settings, _prepare, _ready, settings
from metaloom.flows.prefect_app.serve import serve as serve_flows


def serve(folder: Path, port: int, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaloom.flows.cli", "serve", "--port", str(port), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_refused_with_the_way_to_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = serve(tmp_path, port)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
    assert "--port" in refused.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_with_broken_settings_of_prefect_is_refused(tmp_path):
    (tmp_path / "prefect.toml").write_text("[api")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = serve(tmp_path, port)
    assert refused.returncode == 1
    assert str(tmp_path) in refused.stderr
    assert "Traceback" not in refused.stderr


def test_other_machines_reach_it_only_with_a_password(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    refused = serve(tmp_path, 4300, "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "`export PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD`" in refused.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("password", [":", "lab:", ":secret", "secret"])
def test_half_a_password_is_none(password, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", password)
    with pytest.raises(UsageError, match=r"--host 0\.0\.0\.0: .* required a password"):
        serve_flows(tmp_path, 4300, host="0.0.0.0")


def test_a_folder_is_served_once(tmp_path):
    (tmp_path / ".prefect").mkdir()
    with alone(tmp_path, tmp_path / ".prefect"):
        refused = serve(tmp_path, free_port())
    assert refused.returncode == 1
    assert f"{tmp_path} is being served by another `metaloom serve`" in refused.stderr.replace("\n", " ")
    with alone(tmp_path, tmp_path / ".prefect"):
        pass  # the hold goes with its holder


def test_the_last_port_has_none_behind_it_for_reports(tmp_path):
    assert serve(tmp_path, 65535).returncode == 2


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@ss@h/db", "postgresql://u:...@h/db"),
        ("postgresql://u:pa/ss@h/db", "postgresql://u:...@h/db"),
        ("postgresql://u@h/db?password=hush&x=1", "postgresql://u@h/db?password=...&x=1"),
        ("postgres:/u:secret@h/db", "...@h/db"),
        ("u:secret@h/db", "...@h/db"),
        ("postgresql://h:5432/db", "postgresql://h:5432/db"),
    ],
)
def test_no_password_is_shown(url, shown):
    assert without_password(url) == shown


def test_a_password_that_no_url_can_have_as_it_is_is_refused_without_a_word_of_it():
    with pytest.raises(UsageError, match=r"cannot be read; required .* %XX") as refused:
        require_answer("postgresql+asyncpg://u:sec/ret@127.0.0.1/db")
    assert "sec" not in str(refused.value)


def test_what_the_server_asks_for_is_what_workers_and_flows_say(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "lab:secret")
    told = settings(tmp_path, Address(4300, "0.0.0.0"))
    assert told["PREFECT_API_AUTH_STRING"] == "lab:secret"
    # The parts are on this machine, which has no address 0.0.0.0 to call.
    assert told["PREFECT_API_URL"] == "http://127.0.0.1:4300/api"
    assert settings(tmp_path, Address(4300, "10.0.0.7"))["PREFECT_API_URL"] == "http://10.0.0.7:4300/api"
    assert "secret" not in _ready(Address(4300, "0.0.0.0"), {})


class TestDatabase:
    @pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
    def test_every_spelling_of_postgresql_gets_the_driver_that_there_is(self, scheme):
        assert server_url(f"{scheme}://lab:s@db:5432/prefect") == "postgresql+asyncpg://lab:s@db:5432/prefect"

    @pytest.mark.parametrize("named", ["mysql://lab:secret@db/prefect", "postgresql://lab:secret@db", "prefect"])
    def test_anything_else_is_refused_without_its_password(self, tmp_path, named):
        refused = serve(tmp_path, 4300, "--database", named)
        assert refused.returncode == 2
        assert "required postgresql://USER@HOST:PORT/DATABASE" in refused.stderr
        assert "secret" not in refused.stderr
        assert not any(tmp_path.iterdir())

    def test_one_that_does_not_answer_is_refused_before_anything_starts(self, tmp_path):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            refused = serve(tmp_path, 4300, "--database", f"postgresql://lab:secret@127.0.0.1:{port}/prefect")
        assert refused.returncode == 2
        assert f"lab:...@127.0.0.1:{port}/prefect cannot be used (ConnectionRefusedError" in refused.stderr
        assert "secret" not in refused.stderr
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("prefect.toml", ""),
        ("prefect.toml", "[worker]\nquery_seconds = 2"),
        ("pyproject.toml", "[tool.prefect]\nhome = 'x'"),
    ],
)
def test_settings_of_the_folder_s_own_are_left_alone_and_told_what_they_lack(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    _prepare(tmp_path, Address(4201))
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {file: text}
    told = _ready(Address(4201), _folder_settings(tmp_path))
    assert "run meta-train/meta-train" in told
    assert "first, in that shell: export PREFECT_API_URL=http://127.0.0.1:4201/api" in told


def test_a_folder_without_settings_gets_those_by_which_the_bare_name_is_enough(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'")
    _prepare(tmp_path, Address(4201))
    told = _ready(Address(4201), _folder_settings(tmp_path))
    assert "run meta-train -p" in told
    assert "first, in that shell" not in told


def test_every_deployment_is_named_like_its_flow():
    from metaloom.flows.prefect_app import deployments as meta_train

    flows = {name: getattr(meta_train, name) for name in ("meta_train", "meta_train_custom", "replay", "evaluate")}
    deployments = yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
    names = {d["entrypoint"].removeprefix("metaloom.flows.prefect_app.deployments."): d["name"] for d in deployments}
    assert names == {function: flow.name for function, flow in flows.items()}


class TestReports:
    @pytest.fixture
    def served(self, tmp_path, monkeypatch):
        monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
        folder = tmp_path / "runs" / "reports" / "a run"
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("<p>of the run")
        (tmp_path / "secret").write_text("of somebody else")
        (folder / "link").symlink_to(tmp_path / "secret")
        for name in ("html", "htm"):
            (folder / name).mkdir()
            (folder / name / f"index.{name}").symlink_to(tmp_path / "secret")
        os.mkfifo(folder / "pipe")
        with served_reports("127.0.0.1", 0) as address:
            monkeypatch.setenv("METALOOM_REPORTS_URL", address)
            yield tmp_path / "runs" / "a run"

    def test_a_report_is_where_its_address_says(self, served):
        address = address_of(served, "report.html")
        answer = requests.get(address, timeout=10)
        assert (answer.status_code, answer.text) == (200, "<p>of the run")
        assert answer.headers["Cache-Control"] == "no-cache"
        assert address_of(served.parent.parent / "elsewhere", "report.html") is None

    @pytest.mark.parametrize(
        "path",
        [
            "/a%20run/link", "/../../secret", "/%2e%2e/%2e%2e/secret", "/nothing",
            "/a%20run/html/", "/a%20run/htm/", "/a%20run/pipe", "/a%00run", f"/{300 * 'x'}",
        ],
    )  # fmt: skip
    def test_nothing_outside_of_the_folder_is_served(self, served, path):
        host = address_of(served, "").rsplit("/", 2)[0].removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 404

    def test_a_page_that_has_its_own_name_lead_here_is_refused(self, served):
        answer = requests.get(address_of(served, "report.html"), headers={"Host": "example.org"}, timeout=10)
        assert answer.status_code == 421
        assert "of the run" not in answer.text

    def test_nothing_is_linked_where_nobody_serves(self, served, monkeypatch):
        monkeypatch.delenv("METALOOM_REPORTS_URL")
        assert address_of(served, "report.html") is None


@pytest.mark.parametrize(
    ("heard", "for_good"),
    [
        ([signal.SIGINT], True),
        ([signal.SIGHUP], True),
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGTERM], True),
    ],
)
def test_the_first_signal_says_whether_flow_runs_are_cancelled_or_wait(heard, for_good):
    stop = Stop()
    for number in heard:
        stop.heard(number, None)
    assert (stop.is_set(), stop.for_good) == (True, for_good)
