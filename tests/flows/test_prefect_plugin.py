"""A deployment's bare name; the real command against a real server is in test_prefect_server.py."""

import asyncio
import logging
import sys

import pytest
from prefect.plugins import HookContext

from metaloom.flows.prefect_app.home import write_environment
from metaloom.flows.prefect_app.parts import alone
from metaloom.flows.prefect_app.plugin import accept_bare_names, full_name, setup_environment


class SyncClient:
    def read_deployment_by_name(self, name: str) -> str:
        return name


class AsyncClient:
    async def read_deployment_by_name(self, name: str) -> str:
        return name


def test_a_name_without_a_slash_means_flow_and_deployment_of_that_name():
    assert full_name("meta-train") == "meta-train/meta-train"


def test_a_full_name_is_left_alone():
    assert full_name("meta-train/nightly") == "meta-train/nightly"


def test_both_clients_read_a_bare_name():
    accept_bare_names(SyncClient)
    accept_bare_names(AsyncClient)
    assert SyncClient().read_deployment_by_name("replay") == "replay/replay"
    assert asyncio.run(AsyncClient().read_deployment_by_name("replay")) == "replay/replay"


def test_a_client_is_wrapped_once_however_often_the_plugin_is_set_up():
    class Client(SyncClient):
        def read_deployment_by_name(self, name: str) -> str:
            return name

    accept_bare_names(Client)
    once = Client.read_deployment_by_name
    accept_bare_names(Client)
    assert Client.read_deployment_by_name is once


def test_a_prefect_that_moved_its_client_still_starts_and_is_told_about(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prefect.client.orchestration._deployments.client", None)
    with caplog.at_level(logging.WARNING, "metaloom.flows.prefect_app.plugin"):
        setup_environment(ctx=context(None))
    assert "meta-train/meta-train" in caplog.text


def context(api: str | None) -> HookContext:
    return HookContext(prefect_version="3", api_url=api, logger_factory=logging.getLogger)


class TestPassword:
    """Of the server of the folder, handed to `prefect` commands that are typed there."""

    @pytest.fixture(autouse=True)
    def served(self, tmp_path, monkeypatch):
        (tmp_path / ".prefect").mkdir()
        write_environment(tmp_path, "http://127.0.0.1:4300/api", "metaloom:secret")
        monkeypatch.chdir(tmp_path)
        with alone(tmp_path, tmp_path / ".prefect"):
            yield

    @pytest.mark.parametrize("api", ["http://127.0.0.1:4300/api", "http://localhost:4300/api/"])
    def test_commands_in_the_folder_get_it_and_ask_no_proxy(self, api, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "intranet")
        told = setup_environment(ctx=context(api))
        assert told is not None
        assert told.env["PREFECT_API_AUTH_STRING"] == "metaloom:secret"
        # Where `localhost` is ::1, somebody else may listen there.
        assert told.env["PREFECT_API_URL"] == "http://127.0.0.1:4300/api"
        assert told.env["no_proxy"] == told.env["NO_PROXY"] == "intranet,127.0.0.1,localhost"

    @pytest.mark.parametrize(
        "api", [None, "", "http://127.0.0.1:4301/api", "http://evil.example:4300/api", "https://127.0.0.1:4300/api"]
    )
    def test_no_other_server_gets_it(self, api):
        assert setup_environment(ctx=context(api)) is None

    def test_it_is_not_said_where_no_serve_runs_any_more(self, tmp_path, monkeypatch, caplog):
        api = "http://127.0.0.1:4300/api"
        stopped = tmp_path / "stopped"
        (stopped / ".prefect").mkdir(parents=True)
        write_environment(stopped, api, "metaloom:secret")
        monkeypatch.chdir(stopped)
        for _ in range(2):  # as it was never served, and as it was once
            told = setup_environment(ctx=context(api))
            assert told is not None
            assert "PREFECT_API_AUTH_STRING" not in told.env
            assert "no `metaloom serve` is running here, so its password is not sent" in caplog.text
            caplog.clear()
            with alone(stopped, stopped / ".prefect"):
                told = setup_environment(ctx=context(api))
                assert told is not None
                assert told.env["PREFECT_API_AUTH_STRING"] == "metaloom:secret"
            caplog.clear()

    def test_a_password_that_the_user_chose_is_the_user_s_to_say(self, tmp_path):
        write_environment(tmp_path, "http://127.0.0.1:4300/api", None)
        told = setup_environment(ctx=context("http://127.0.0.1:4300/api"))
        assert told is not None
        assert "PREFECT_API_AUTH_STRING" not in told.env


@pytest.mark.parametrize("group", ["prefect.plugins"])
def test_prefect_finds_the_plugin_through_its_entry_point(group):
    from importlib.metadata import entry_points

    (point,) = [point for point in entry_points(group=group) if point.name == "metaloom"]
    assert point.load() is sys.modules["metaloom.flows.prefect_app.plugin"]
