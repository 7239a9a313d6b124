"""Refusals of `metaloom serve` before it starts anything; all it starts is in test_prefect_server.py."""

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.request import proxy_bypass
from uuid import UUID

import httpx
import psutil
import pytest
import requests
import yaml
from prefect.server.api.server import create_app
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING, temporary_settings
from prefect_server import clean_environment, free_port
from starlette.types import ASGIApp, Message

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.prefect_app import flow_runs
from metaloom.flows.prefect_app import home as home_module
from metaloom.flows.prefect_app.deploy import FILE
from metaloom.flows.prefect_app.home import (
    API,
    AUTH,
    Address,
    folder_settings,
    make_home,
    read_environment,
    write_environment,
    write_settings,
)
from metaloom.flows.prefect_app.parts import ServeError, StopRequest, alone, running
from metaloom.flows.prefect_app.reports import address_of, served_reports
from metaloom.flows.prefect_app.serve import (
    _listening,
    _prepare,
    require_answer,
    server_url,
    settings,
    without_password,
)
from metaloom.flows.prefect_app.serve import serve as serve_flows
from metaloom.flows.prefect_app.server import guarded


def serve(folder: Path, port: int, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaloom.flows.cli", "serve", "--port", str(port), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_a_port_in_use_is_refused_with_the_way_to_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = serve(tmp_path, port)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
    assert "--port" in refused.stderr
    assert not any(tmp_path.iterdir())


def test_nobody_can_take_a_port_that_is_served(tmp_path):
    """Neither who has bound it before, since that is no use, nor anybody later."""
    with socket.socket() as before, socket.socket() as later:
        for other in (before, later):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        before.bind(("0.0.0.0", 0))
        port = before.getsockname()[1]
        with _listening(Address(port)):
            with pytest.raises(OSError, match="in use"):
                before.listen()
            with pytest.raises(OSError, match="in use"):
                later.bind(("127.0.0.1", port))


def test_a_server_that_has_ended_is_not_asked_whoever_answers_in_its_place():
    with running("it", ["timeit", "-n", "1", "-r", "1", "raise ValueError"]) as part:
        part.process.wait()
        with pytest.raises(ServeError, match="it ended with code 1"):
            flow_runs._wait(StopRequest(), part, lambda: True)


def test_a_deployment_does_not_outlast_the_server_that_it_needs():
    with (
        running("the server", ["timeit", "-n", "1", "-r", "1", "raise ValueError"]) as server,
        running("the deployment", ["timeit", "while True: pass"]) as step,
    ):
        server.process.wait()
        with pytest.raises(ServeError, match=r"the server ended \(exit code 1\)"):
            flow_runs._wait(StopRequest(), step, lambda: False, needs=server)


def test_a_part_that_is_not_ready_in_time_is_told():
    stop = StopRequest()
    stop.set()  # which is looked at only after the time
    with (
        running("it", ["timeit", "while True: pass"]) as part,
        pytest.raises(ServeError, match="it is not ready after 0 s"),
    ):
        flow_runs._wait(stop, part, lambda: False, seconds=0)


def test_a_folder_with_broken_settings_of_prefect_is_refused(tmp_path):
    (tmp_path / "prefect.toml").write_text("[api")
    refused = serve(tmp_path, free_port())
    assert refused.returncode == 1
    assert f"{tmp_path}/prefect.toml" in refused.stderr.replace("\n", "")
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
    with pytest.raises(UsageError, match=r"--host 0\.0\.0\.0: .* Set a password first"):
        serve_flows(tmp_path, 4300, host="0.0.0.0")


def test_a_password_that_the_page_cannot_send_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "lab:gehe\u00efm")
    with pytest.raises(UsageError, match=r"contains non-ASCII characters"):
        serve_flows(tmp_path, 4300)


def test_without_the_password_prefect_s_server_shows_no_docs_and_knows_no_other_one():
    async def statuses(app: ASGIApp) -> dict[str, int]:
        transport, found = httpx.ASGITransport(app), {}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:4300") as client:
            for path in ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/api/docs", "/api/openapi.json"):
                found[path] = (await client.get(path)).status_code
            for password in ("lab:other", "lab:secret"):
                said = {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
                found[password] = (await client.get("/api/admin/version", headers=said)).status_code
        return found

    async def heard(app: ASGIApp, token: str) -> list[str]:
        said = json.dumps({"type": "auth", "token": token})
        heard: list[str] = []
        told = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": said}])

        async def receive() -> Message:
            return next(told, {"type": "websocket.disconnect", "code": 1000})

        async def send(message: Message) -> None:
            heard.append(message.get("reason") or message.get("text") or message["type"])

        scope = {"type": "websocket", "path": "/api/events/out", "raw_path": b"/api/events/out", "query_string": b""}
        headers = [(b"host", b"127.0.0.1:4300"), (b"sec-websocket-protocol", b"prefect")]
        await app({**scope, "headers": headers}, receive, send)
        return heard[1:2]

    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: "lab:secret"}):
        app = guarded(create_app(final=True), any_host=False)
        found = asyncio.run(statuses(app))
        refused, let_in = (asyncio.run(heard(app, token)) for token in ("lab:other", "lab:secret"))
    assert [*found.values()] == [404, 404, 404, 404, 401, 401, 401, 200], found
    assert "nvalid token" in refused[0]
    assert "auth_success" in let_in[0]


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
    with pytest.raises(UsageError, match=r"cannot be parsed; use .* percent-encode") as refused:
        require_answer("postgresql+asyncpg://u:sec/ret@127.0.0.1/db")
    assert "sec" not in str(refused.value)


def test_what_the_server_asks_for_is_what_workers_and_flows_say(tmp_path):
    told = settings(tmp_path, Address(4300, "0.0.0.0"), "lab:secret")
    assert told["PREFECT_API_AUTH_STRING"] == told["PREFECT_SERVER_API_AUTH_STRING"] == "lab:secret"
    # The parts are on this machine, which has no address 0.0.0.0 to call.
    assert told["PREFECT_API_URL"] == "http://127.0.0.1:4300/api"
    # Which may be ::1 as well, where somebody else may listen.
    assert settings(tmp_path, Address(4300, "localhost"), "lab:secret")["PREFECT_API_URL"] == told["PREFECT_API_URL"]
    assert settings(tmp_path, Address(4300, "10.0.0.7"), "lab:secret")["PREFECT_API_URL"] == "http://10.0.0.7:4300/api"


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_no_proxy_is_asked_for_the_server(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv(name, "intranet")
    for variable, value in settings(tmp_path, Address(4300, "10.0.0.7"), "lab:secret").items():
        monkeypatch.setenv(variable, value)
    hosts = {"127.0.0.1": True, "localhost": True, "10.0.0.7": True, "intranet": True, "example.org": False}
    assert {host: bool(proxy_bypass(host)) for host in hosts} == hosts


def test_a_prefect_home_where_nobody_can_write_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", "/dev/null/prefect")
    assert settings(tmp_path, Address(4300), "lab:secret")["PREFECT_HOME"] == str(tmp_path)


def test_python_finds_modules_where_the_user_said_although_the_parts_work_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["plugins", "/opt/more", ""]))
    told = settings(tmp_path, Address(4300), "lab:secret")
    assert told["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "plugins"), "/opt/more"]


class TestHome:
    """`.prefect`, in which a folder keeps the password of its server."""

    def test_the_password_is_one_per_folder_for_this_user_alone_and_no_repository_takes_it(self, tmp_path):
        home, password = make_home(tmp_path, trust=False)
        assert make_home(tmp_path, trust=False) == (home, password)
        assert len(password) > 32
        (tmp_path / "other").mkdir()
        assert make_home(tmp_path / "other", trust=False)[1] != password
        write_environment(tmp_path, Address(4300).api, password)
        assert {stat.S_IMODE(file.stat().st_mode) for file in home.iterdir()} == {0o600}
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
        _prepare(tmp_path, Address(4300), {}, password)
        added = subprocess.run(
            ["git", "add", "--dry-run", "."], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert added.stdout.split() == ["add", "'prefect.toml'"]
        assert password not in (tmp_path / "prefect.toml").read_text()

    def test_a_shell_that_reads_the_environment_reaches_the_server(self, tmp_path, monkeypatch):
        monkeypatch.setenv("no_proxy", "in tra'net")
        make_home(tmp_path, trust=False)
        write_environment(tmp_path, Address(4300).api, "a:$(b)'c")
        shown = ["sh", "-c", '. "$0"; printf "%s\\n" "$PREFECT_API_URL" "$PREFECT_API_AUTH_STRING" "$NO_PROXY"']
        file = tmp_path / ".prefect" / "environment"
        told = subprocess.run([*shown, file], check=True, capture_output=True, text=True).stdout.splitlines()
        assert told == ["http://127.0.0.1:4300/api", "a:$(b)'c", "in tra'net,127.0.0.1,localhost"]
        assert [read_environment(tmp_path)[name] for name in (API, AUTH, "NO_PROXY")] == told

    def test_a_password_that_came_with_a_folder_is_not_used(self, tmp_path):
        (tmp_path / ".prefect").mkdir()
        (tmp_path / ".prefect" / "password").write_text("known:to somebody else")
        assert "known" not in make_home(tmp_path, trust=False)[1]

    def test_a_database_that_came_with_a_folder_is_used_when_the_user_says_so(self, tmp_path):
        (tmp_path / ".prefect").mkdir()
        (tmp_path / ".prefect" / "prefect.db").touch()
        refused = serve(tmp_path, free_port())
        assert refused.returncode == 2
        assert "has a database that was made by an earlier version, or by somebody else" in refused.stderr
        assert [path.name for path in (tmp_path / ".prefect").iterdir()] == ["prefect.db"]
        home, password = make_home(tmp_path, trust=True)
        assert make_home(tmp_path, trust=False) == (home, password)

    def test_without_a_configuration_folder_the_user_learns_what_is_needed(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
        make_home(tmp_path, trust=False)
        assert "cannot record that you trust" in caplog.text
        assert "the next start needs --trust" in caplog.text

    @pytest.mark.parametrize("mode", [0o755, 0o775])
    def test_one_that_others_can_read_is_closed_to_them(self, tmp_path, mode):
        (tmp_path / ".prefect").mkdir()
        (tmp_path / ".prefect").chmod(mode)
        home, _ = make_home(tmp_path, trust=False)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    @pytest.mark.parametrize("trust", [False, True])
    @pytest.mark.parametrize("planted", ["open to all", "of somebody else", "a file"])
    def test_one_in_which_others_can_have_put_something_is_refused(self, tmp_path, monkeypatch, trust, planted):
        home = tmp_path / ".prefect"
        if planted == "a file":
            home.touch()
        else:
            home.mkdir()
        if planted == "open to all":
            home.chmod(0o777)
        if planted == "of somebody else":
            user = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: user)
            monkeypatch.setattr(home_module, "_require_kept", lambda folder: None)  # which would refuse it first
        with pytest.raises(UsageError, match=r"prefect (can be|belongs|is a).*You must own it.*Remove it"):
            make_home(home.parent, trust=trust)
        assert home.is_file() or not any(home.iterdir())

    def test_a_folder_that_others_can_write_is_refused_unless_they_are_trusted_or_cannot_rename(self, tmp_path):
        for mode, gid in ((0o777, os.getegid()), (0o775, 4321)):
            folder = tmp_path / f"{mode:o}"
            folder.mkdir()
            folder.chmod(mode)
            if mode == 0o775:
                if os.geteuid():
                    continue  # only root can give a folder to a group that it is not in
                os.chown(folder, -1, gid)
            with pytest.raises(UsageError, match=rf"{mode:o} can be written by others .* Start .* --trust"):
                make_home(folder, trust=False)
            assert not any(folder.iterdir())
            folder.chmod(mode | stat.S_ISVTX)
            make_home(folder, trust=False)
            folder.chmod(mode)
            make_home(folder, trust=True)

    @pytest.mark.parametrize("name", [".", "password", "environment", ".gitignore", "logging.yml"])
    def test_links_in_a_folder_are_not_followed(self, tmp_path, name):
        (tmp_path / "outside").mkdir()
        target = tmp_path / "outside" / "file"
        target.write_text("as it was")
        folder = tmp_path / "served"
        (folder / ".prefect").mkdir(parents=True)
        if name == ".":
            (folder / ".prefect").rmdir()
            (folder / ".prefect").symlink_to(target.parent)
            with pytest.raises(UsageError, match=r"is a link\. You must own it"):
                make_home(folder, trust=False)
        else:
            (folder / ".prefect" / name).symlink_to(target)
            home, password = make_home(folder, trust=False)
            write_environment(folder, Address(4300).api, password)
            write_settings(home)
        assert target.read_text() == "as it was"
        assert [*target.parent.iterdir()] == [target]

    @pytest.mark.parametrize("name", ["server.log", "serve.lock"])
    @pytest.mark.parametrize("put", ["a link", "a pipe", "a pipe that is read", "a folder"])
    def test_only_files_are_written(self, tmp_path, name, put):
        file, target = tmp_path / name, tmp_path / "target"
        reader = None
        if put == "a link":
            file.symlink_to(target)
        elif put == "a folder":
            file.mkdir()
        else:
            os.mkfifo(file)
            reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK) if "read" in put else None
        held = alone(tmp_path, tmp_path) if name == "serve.lock" else running("it", ["this"], file)
        with pytest.raises(ServeError, match=rf"{name} (cannot be written|is a pipe).*; remove it"):
            held.__enter__()
        assert not target.exists()
        if reader is not None:
            os.close(reader)


class TestDatabase:
    @pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
    def test_every_spelling_of_postgresql_gets_the_driver_that_there_is(self, scheme):
        assert server_url(f"{scheme}://lab:s@db:5432/prefect") == "postgresql+asyncpg://lab:s@db:5432/prefect"

    @pytest.mark.parametrize("named", ["mysql://lab:secret@db/prefect", "postgresql://lab:secret@db", "prefect"])
    def test_anything_else_is_refused_without_its_password(self, tmp_path, named):
        refused = serve(tmp_path, 4300, "--database", named)
        assert refused.returncode == 2
        assert "expected postgresql://USER@HOST:PORT/DATABASE" in refused.stderr
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
        ("prefect.toml", "api = 1\n[worker]\nquery_seconds = 2"),
        ("pyproject.toml", "[tool.prefect]\nhome = 'x'\n[tool.prefect.worker]\nquery_seconds = 2"),
    ],
)
def test_settings_of_the_folder_s_own_are_left_alone_and_told_what_they_lack(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    told = prepared(tmp_path, 4201)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {file: text}
    assert "run meta-train/meta-train" in told
    assert f"first            . {tmp_path}/.prefect/environment\n" in told
    assert ("ignored          worker in Prefect's settings here" in told) == ("worker" in text)


def test_a_folder_without_settings_gets_those_by_which_the_bare_name_is_enough(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'")
    told = prepared(tmp_path, 4201)
    assert "run meta-train -p" in told
    assert "first  " not in told
    password = base64.b64encode(read_environment(tmp_path)[AUTH].encode()).decode()
    assert f"Prefect's page   http://127.0.0.1:4201/open#{password}\n" in told
    assert "reports          http://127.0.0.1:4202\n" in told
    (tmp_path / ".env").write_text("PREFECT_LOGGING_LEVEL=DEBUG\nOTHER=1\n")
    again = prepared(tmp_path, 4201)
    assert "first  " not in again
    assert "ignored          PREFECT_LOGGING_LEVEL in" in again
    assert "first  " in prepared(tmp_path, 4301)


@pytest.mark.parametrize("where", ["shell", ".env"])
def test_another_server_that_is_named_in_the_shell_or_the_folder_is_told_how_to_leave(tmp_path, monkeypatch, where):
    prepared(tmp_path, 4201)
    if where == "shell":
        monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
    else:
        (tmp_path / ".env").write_text("PREFECT_API_URL=http://elsewhere:4200/api")
    assert f"first            . {tmp_path}/.prefect/environment\n" in prepared(tmp_path, 4201)
    monkeypatch.setenv("PREFECT_API_URL", "http://localhost:4201/api/")
    assert "first  " not in prepared(tmp_path, 4201)


def test_a_password_that_the_user_chose_is_neither_shown_nor_kept(tmp_path):
    make_home(tmp_path, trust=False)
    told = _prepare(tmp_path, Address(4300, "0.0.0.0"), {}, None)
    assert "Prefect's page   http://127.0.0.1:4300\nreports          not served; they are beside the runs\n" in told
    assert "export PREFECT_API_AUTH_STRING=USER:PASSWORD" in told
    assert AUTH not in read_environment(tmp_path)


def prepared(folder: Path, port: int) -> str:
    """What is said when the server of a folder is ready."""
    return _prepare(folder, Address(port), folder_settings(folder), make_home(folder, trust=False)[1])


class TestForeignFolder:
    """What lies in a folder does not run because somebody works there."""

    LOGGING = "[logging]\nconfig_path = 'logging.yml'\n"

    @pytest.fixture
    def folder(self, tmp_path):
        """Settings of Prefect, modules with the names of installed ones, and what would tell that they have run."""
        (tmp_path / "logging.yml").write_text(
            "version: 1\nhandlers:\n  evil: {'()': os.system, command: touch ran-by-settings}\n"
            "loggers: {prefect: {handlers: [evil]}}\n"
        )
        (tmp_path / "prefect.toml").write_text(self.LOGGING)
        (tmp_path / "pyproject.toml").write_text(self.LOGGING.replace("[", "[tool.prefect."))
        (tmp_path / ".env").write_text("PREFECT_LOGGING_SETTINGS_PATH=logging.yml\n")
        for name in ("prefect", "yaml", "numpy", "uvicorn", "sitecustomize"):
            (tmp_path / f"{name}.py").write_text(f"open('ran-by-{name}', 'w').close()\n")
        return tmp_path

    def ran(self, folder: Path) -> list[str]:
        return [path.name for path in folder.glob("ran-*")]

    @pytest.fixture
    def environment(self, folder) -> dict[str, str]:
        home, password = make_home(folder, trust=False)
        (home / "logging.yml").write_text((folder / "logging.yml").read_text())
        return clean_environment() | settings(home, Address(free_port()), password)

    def test_the_trap_works(self, folder):
        (folder / "prefect.py").unlink()
        code = "import prefect.main"
        subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=clean_environment(), capture_output=True)
        assert self.ran(folder) == ["ran-by-settings"]

    def test_the_process_of_a_flow_run_follows_no_settings_and_finds_installed_modules_first(self, folder, environment):
        code = (
            "import os, runpy; runpy.run_module = lambda *a, **k: None\n"
            "from metaloom.flows.prefect_app.flow_process import main; main()\n"
            "import prefect.main, yaml, numpy; from prefect.settings import Settings; again = Settings()\n"
            "print(os.getcwd(), again.logging.config_path, again.api.url)"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], cwd="/", env=environment, capture_output=True, text=True, check=True
        )
        where, config, api = done.stdout.split()
        assert (where, api) == (str(folder), environment[API])
        assert config == str(folder / ".prefect" / "logging.yml")
        assert self.ran(folder) == []

    def test_doctor_runs_nothing(self, folder):
        command = [sys.executable, "-P", "-m", "metaloom.flows.cli", "doctor"]
        subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, timeout=120)
        assert self.ran(folder) == []


def test_every_deployment_is_named_like_its_flow():
    from metaloom.flows.prefect_app import deployments as meta_train

    flows = {name: getattr(meta_train, name) for name in ("meta_train", "meta_train_custom", "replay", "evaluate")}
    deployments = yaml.safe_load(FILE.read_text())["deployments"]
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
        with served_reports(socket.create_server(("127.0.0.1", 0))) as address:
            monkeypatch.setenv("METALOOM_REPORTS_URL", address)
            yield tmp_path / "runs" / "a run"

    def test_a_report_is_where_its_address_says(self, served):
        address = address_of(served, "report.html")
        answer = requests.get(address, timeout=120)
        assert (answer.status_code, answer.text) == (200, "<p>of the run")
        assert answer.headers["Cache-Control"] == "no-cache"
        listed = requests.get(address.rsplit("/", 2)[0], timeout=120)
        assert '<a href="a%20run/report.html">a run/report.html</a>' in listed.text
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
        with closing(http.client.HTTPConnection(host, timeout=120)) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == 404

    def test_a_page_that_has_its_own_name_lead_here_is_refused(self, served):
        answer = requests.get(address_of(served, "report.html"), headers={"Host": "example.org"}, timeout=120)
        assert answer.status_code == 421
        assert "of the run" not in answer.text

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Origin": "http://127.0.0.1:4200"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, 403),
            ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
            ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image", "Origin": "http://evil.example"}, 403),
            ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
            ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
            ({"Sec-Fetch-Site": "same-origin", "X-Name": "\u00ef"}, 200),
        ],
    )
    def test_other_pages_open_reports_and_get_nothing_else(self, served, headers, status):
        address = address_of(served, "report.html")
        assert requests.get(address, headers=headers, timeout=120).status_code == status

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
    stop = StopRequest()
    for number in heard:
        stop.heard(number, None)
    assert (stop.is_set(), stop.for_good) == (True, for_good)


def test_a_database_that_is_removed_ends_serve_with_the_runs_to_go_on_with(tmp_path, tiny_config, monkeypatch):
    database, config = tmp_path / "prefect.db", tiny_config()
    database.touch()
    monkeypatch.setattr(flow_runs, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(flow_runs, "flow_processes", lambda home: {UUID(int=1): psutil.Process()})
    about = {"config": config.model_dump(mode="json"), "config_digest": config.digest(), "environment": {}}
    server = SimpleNamespace(require=database.unlink)
    go_on = rf"\ncontinue with: metaloom resume {tmp_path}/a\ncontinue with: metaloom resume '{tmp_path}/b run'$"
    with (
        storage.create_run(tmp_path / "b run", capacity=3, **about),
        storage.create_run(tmp_path / "a", capacity=3, **about),
        pytest.raises(ServeError, match=rf"prefect\.db was removed(.|\n)*{go_on}"),
    ):
        flow_runs._keep_running(StopRequest(), server, SimpleNamespace(require=lambda: None), tmp_path)
