"""Refusals of `metaloom serve` before it starts anything; all it starts is in test_prefect_server.py."""

import http.client
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import yaml

from metaloom.flows.prefect_app.reports import address_of, served_reports
from metaloom.flows.prefect_app.serve import HERE, _folder_settings, _prepare, _ready


def serve(folder: Path, port: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaloom.flows.cli", "serve", "--port", str(port)]
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
    _prepare(tmp_path, 4201)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {file: text}
    told = _ready(4201, _folder_settings(tmp_path))
    assert "run meta-train/meta-train" in told
    assert "first, in that shell: export PREFECT_API_URL=http://127.0.0.1:4201/api" in told


def test_a_folder_without_settings_gets_those_by_which_the_bare_name_is_enough(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'")
    _prepare(tmp_path, 4201)
    told = _ready(4201, _folder_settings(tmp_path))
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
        assert answer.status_code == 403
        assert "of the run" not in answer.text

    def test_nothing_is_linked_where_nobody_serves(self, served, monkeypatch):
        monkeypatch.delenv("METALOOM_REPORTS_URL")
        assert address_of(served, "report.html") is None
