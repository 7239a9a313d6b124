"""Who may ask the page over runs: whoever has its address, on this machine, and no other page."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forging import forge
from viewing import TOKEN, Viewer

from metaloom.flows import cli
from metaloom.flows.errors import ExtraMissing
from metaloom.flows.prefect_app.server import guarded
from metaloom.flows.viewer import pages
from metaloom.flows.viewer.gate import HEADERS
from metaloom.flows.views import page

PAGE = f"/{TOKEN}/"
RUNS = f"/{TOKEN}/api/runs"
OWN = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def viewer(tmp_path_factory, copy_tiny_run):
    folder = tmp_path_factory.mktemp("gate")
    copy_tiny_run(folder / "runs" / "tiny")
    (folder / "secret.txt").write_text("secret")
    return Viewer(folder / "runs")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (PAGE, 200), (f"{PAGE}main.js", 200), (f"{PAGE}plotly.min.js", 200), (RUNS, 200),
        ("/", 403), ("/api/runs", 403), ("/x/api/runs", 403), (f"/{TOKEN}x/api/runs", 403), (f"/{TOKEN[:-1]}/", 403),
        (f"//{TOKEN}/", 403), ("/tökén/", 403),
    ],
)  # fmt: skip
def test_nothing_is_told_without_the_token(viewer, path, status):
    answer = viewer.answer(path)
    assert answer.status_code == status
    assert status == 200 or TOKEN not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:1"}, 200), ({"host": "localhost:8022"}, 200), ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421), ({"host": "evil.example:8000"}, 421), ({"host": "[::1"}, 421),
        ({"host": ""}, 421), ({"host": "127.0.0.1@evil.example"}, 421),
        ({"origin": OWN}, 200), ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200), ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
    ],
)  # fmt: skip
def test_other_pages_get_nothing_even_with_the_token(viewer, headers, status):
    assert viewer.answer(RUNS, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["*", "", "nothing", TOKEN])
def test_a_request_by_hand_without_a_slash_is_refused(viewer, path):
    sent = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"127.0.0.1:8000")]}
    asyncio.run(viewer.app(scope, receive, send))
    assert sent[0]["status"] == 403


@pytest.mark.parametrize(
    ("headers", "any_host", "is_refused"),
    [
        ({"host": "127.0.0.1:4200", "origin": "http://127.0.0.1:4200"}, False, False),
        ({"host": "127.0.0.1:4200"}, False, False),
        ({"host": "127.0.0.1:4200", "origin": "http://127.0.0.1:8000"}, False, True),
        ({"host": "lab.example:4200", "origin": "http://lab.example:4200"}, False, True),
        ({"host": "lab.example:4200", "origin": "http://lab.example:4200"}, True, False),
        ({"host": "lab.example:4200", "origin": "http://evil.example"}, True, True),
        ({"origin": "http://evil.example"}, True, True),
    ],
)
def test_websockets_of_other_pages_are_closed_before_the_application_sees_them(headers, any_host, is_refused):
    sent, seen = [], []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    async def send(message):
        sent.append((message["type"], message["code"]))

    gate = guarded(app, any_host=any_host)
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    for kind in ("websocket", "lifespan"):
        asyncio.run(gate({"type": kind, "path": "/open", "headers": encoded}, None, send))
    assert (
        (sent, seen) == ([("websocket.close", 1008)], ["lifespan"]) if is_refused else ([], ["websocket", "lifespan"])
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_there_is_nothing_to_change(viewer, method):
    assert viewer.answer(RUNS, method=method).status_code == 405


@pytest.mark.parametrize("path", [PAGE, RUNS, "/", f"{PAGE}nothing", f"/{TOKEN}/api/run/nothing"])
def test_every_answer_tells_the_browser_to_keep_to_itself(viewer, path):
    answer = viewer.answer(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "access-control-allow-origin" not in answer.headers
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "static/../../secret.txt", "..%2f..%2fpyproject.toml",
        "api/run/..%2f..", "api/run/%2e%2e", "api/run/..%2f..%2fsecret.txt", "api/run/tiny%2f..%2f../live",
        "api/run//live", "api/run/%2e%2e%2fsecret.txt/live",
        "api/run/tiny%00/live", "__init__.py", "../__init__.py", "..%5csecret.txt",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_runs(viewer, path):
    answer = viewer.answer(PAGE + path)
    assert answer.status_code in (403, 404, 405), answer.text
    assert "secret" not in answer.text.replace("secret.txt", "")


def test_names_of_runs_are_text_wherever_they_stand(viewer, tmp_path, copy_tiny_run):
    name = """<img src=x onerror=alert(1)>'"&"""
    copy_tiny_run(tmp_path / name)
    page = Viewer(tmp_path)
    answer = page.answer(RUNS)
    assert answer.headers["content-type"] == "application/json"
    assert [row["name"] for row in answer.json()["runs"]] == [name]
    graph = page.get("run", name, "iteration", 0)["graph"]
    assert "<img" not in graph
    assert "%3Cimg%20src%3Dx" in graph
    script = (Path(pages.__file__).parent / "static").glob("*.js")
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()) for file in script
    )


@pytest.mark.parametrize("section", ["env", "algorithm"])
@pytest.mark.parametrize("name", [5, None, ["x"], {"x": "y"}])
def test_a_run_whose_settings_have_no_names_is_damaged_in_the_list_and_hides_no_other(
    tmp_path, copy_tiny_run, section, name
):
    for run in ("good", "forged"):
        copy_tiny_run(tmp_path / run)
    forge(tmp_path / "forged", lambda document: document["config"][section].update(name=name))
    rows = {row["name"]: row for row in Viewer(tmp_path).get("runs")["runs"]}
    assert rows["forged"]["state"] == "damaged"
    assert f"without {section}.name" in rows["forged"]["problem"]
    assert isinstance(rows["good"]["env"], str)


def test_a_folder_whose_name_is_no_text_has_one_in_the_list(tmp_path, copy_tiny_run):
    copy_tiny_run(tmp_path / os.fsdecode(b"caf\xe9"))
    (row,) = Viewer(tmp_path).get("runs")["runs"]
    # A browser makes no address of half a character, and stops where it is asked to.
    assert row["name"].encode() == b"caf?"


def test_without_plotly_the_command_says_what_brings_it(monkeypatch):
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match=r"metaloom\[view\]"):
        page.plotly_file()


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.run(["view", "--port", str(taken.getsockname()[1])]) == 2
    assert "use a free port" in capsys.readouterr().err
    assert cli.run(["view", "nothing-here"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_listens_on_this_machine_alone_and_ends_with_ctrl_c(tmp_path, copy_tiny_run):
    copy_tiny_run(tmp_path / "runs" / "tiny")
    command = [sys.executable, "-m", "metaloom.flows.cli", "view", "runs"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", process.stdout.readline())
            assert address is not None
            listening = [c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
            assert listening == ["127.0.0.1"]
            asked = f"import json, urllib.request as r; print(r.urlopen('{address[0]}api/runs').read().decode())"
            told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
            assert [row["name"] for row in json.loads(told.stdout)["runs"]] == ["tiny"]
        finally:
            process.send_signal(2)
            code = process.wait(timeout=60)
        assert code == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    shutil.rmtree(tmp_path / "runs")
